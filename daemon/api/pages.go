package api

import (
	"context"
	"encoding/base64"

	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/sandbox"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Bounds of a list, as the API documents. No reply passes 2 MiB: gRPC clients take 4 MiB by default.
const (
	defaultPage  = 100
	maxPage      = 1000
	maxPageBytes = 1 << 20
	maxToken     = 512
	tokenBytes   = 16 // of the hash in a page token
	basicSpec    = 4 << 10
	fullSpec     = 1 << 20
)

// listing is a request for a page.
type listing interface {
	proto.Message
	GetPageSize() uint32
	GetPageToken() string
	GetView() berthv1.View
}

// pageOf reads where a list begins, how long it is, and how much of each spec it shows. cut gets the ids of
// the records whose specs were cut.
func (a *api) pageOf(ctx context.Context, request listing, cut map[string]bool) (sandbox.Page, error) {
	page := sandbox.Page{Size: int(min(request.GetPageSize(), maxPage)), Bytes: maxPageBytes, Canceled: ctx.Err}
	if page.Size == 0 {
		page.Size = defaultPage
	}
	limit := basicSpec
	if request.GetView() == berthv1.View_VIEW_FULL {
		limit = fullSpec
	}
	page.Cut = func(record proto.Message) {
		switch record := record.(type) {
		case *recordv1.JobRecord:
			cut[record.GetId()] = cutJobSpec(record.GetSpec(), limit)
		case *recordv1.SandboxRecord:
			cut[record.GetId()] = cutSandboxSpec(record.GetSpec(), limit)
		}
	}
	token := request.GetPageToken()
	if token == "" {
		return page, nil
	}
	decoded, err := base64.RawURLEncoding.DecodeString(token)
	if err == nil && len(decoded) > tokenBytes && len(token) <= maxToken {
		page.After = string(decoded[tokenBytes:])
	}
	if page.After == "" || a.tokenOf(ctx, request, page.After) != token {
		return page, fault.Invalid("page_token", "is not one that this broker gave for this list: take next_page_token as it is, and keep the filter")
	}
	return page, nil
}

// tokenOf makes the token of the page that begins after a record; empty when there is none. It is good only
// for the same list in the same namespace.
func (a *api) tokenOf(ctx context.Context, request listing, after string) string {
	if after == "" {
		return ""
	}
	same := request.ProtoReflect().New()
	proto.Merge(same.Interface(), request)
	fields := same.Descriptor().Fields()
	same.Clear(fields.ByName("page_size"))
	same.Clear(fields.ByName("page_token"))
	hash := a.Hasher.BodyHash("page after "+after+" in "+namespace(ctx)+" of "+string(same.Descriptor().FullName()), same.Interface())
	return base64.RawURLEncoding.EncodeToString(append(hash[:tokenBytes:tokenBytes], after...))
}

// cutJobSpec shortens a spec to about limit bytes and reports whether it had to: without the environment,
// and where that is not enough with the beginning of the command.
func cutJobSpec(spec *berthv1.JobSpec, limit int) bool {
	if proto.Size(spec) <= limit {
		return false
	}
	spec.Env, spec.SecretEnv = nil, nil
	spec.Shell = cutTo(spec.GetShell(), limit)
	left := limit
	for i, arg := range spec.GetArgv() {
		if left -= len(arg) + 2; left < 0 {
			spec.Argv = append(spec.Argv[:i:i], cutTo(arg, max(left+len(arg), 0)))
			break
		}
	}
	return true
}

// cutSandboxSpec is cutJobSpec for a sandbox's.
func cutSandboxSpec(spec *berthv1.SandboxSpec, limit int) bool {
	if proto.Size(spec) <= limit {
		return false
	}
	spec.Env, spec.SecretEnv, spec.ProviderOptions = nil, nil, nil
	if spec.GetEgress() != nil {
		spec.Egress.AllowHosts = nil
	}
	return true
}
