package machines

import (
	"testing"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

func TestContainmentIsStrongOnlyWhereTheGuestSaysThatNothingEscapes(t *testing.T) {
	strong := map[guestv1.Containment]bool{
		guestv1.Containment_CONTAINMENT_CGROUP: true, guestv1.Containment_CONTAINMENT_PID_NAMESPACE: true, guestv1.Containment_CONTAINMENT_SHIM: true,
	}
	kinds := []guestv1.Containment{1000} // of a guest that is newer, or lies
	for number := range guestv1.Containment_name {
		kinds = append(kinds, guestv1.Containment(number))
	}
	for _, kind := range kinds {
		if weak := WeakContainment(&guestv1.HelloResponse{Containment: kind}); weak == strong[kind] {
			t.Errorf("%v: weak is %v", kind, weak)
		}
	}
}
