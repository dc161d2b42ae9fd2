package robust

import (
	"os"
	"testing"
)

func TestZZ(t *testing.T) {
	p := os.Getenv("ZZ")
	if p == "" {
		t.Skip()
	}
	ev, err := ReadHistory(p)
	if err != nil {
		t.Fatal(err)
	}
	r := Check(ev)
	for i, x := range r.Problems {
		if i < 30 {
			t.Log(x)
		}
	}
	t.Log(summary(ev, r))
}
