package vault

import (
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const (
	goldenFingerprint = "a2de7647"
	goldenSealed      = "01838b14fcc646ec50fc4b10fda824a4902a26b2274d6e3c3d062753c23ef4a9c276"
)

// goldenHashes are the vectors of hash version 1. None of them may ever change.
func goldenHashes() []golden {
	return []golden{
		{"no body", startJob, nil, "3d81d11269f54dc451fc46535f23020dc177ffe198fb24020633b5f18346d1dc"},
		{"a full job", startJob, fullJob(), "ca14989550128a285e8fe924dd674d5bd164079db529baabd0f528f732e0eec5"},
		{"a job with an unknown field", startJob, withUnknown(fullJob()), "8ff74b7c0f77d60aab7dbdf1c96f3f22af6a768c589c1fc3a105b94956d33f96"},
		{"a sandbox", createSandbox, &berthv1.CreateSandboxRequest{
			RequestId: "r-1",
			Spec: &berthv1.SandboxSpec{
				Provider:  "local",
				Labels:    map[string]string{"b": "2", "a": "1"},
				Resources: &berthv1.Resources{Cpus: 1.5, MemoryBytes: 1 << 40},
				Egress:    &berthv1.Egress{Mode: berthv1.Egress_MODE_ALLOW_LIST, AllowHosts: []string{"*.example.com"}},
			},
		}, "f1694f344492b09d2f342755d319ee64f130fc05aef727ceb0156e61549742c6"},
		{"a negative number", "m", wrapperspb.Int32(-1), "5d5ca1cdaf80a3741982813ccb4d5921e546926c5baba09841b6341c8b8e796b"},
		{"a value of values", "m", structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{
			structpb.NewNullValue(), structpb.NewBoolValue(true), structpb.NewNumberValue(-0.5), structpb.NewStringValue("é"),
		}}), "b7fa68ceef22d9e72c056a1ecc5c629660b3dd08e261d44bab8750ae1925e047"},
	}
}
