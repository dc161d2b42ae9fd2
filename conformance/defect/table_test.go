package defect

import (
	"strings"
	"testing"

	"github.com/berth-sandbox/berth/conformance/broker"
)

// The least of defects, of those that the robust suite finds too, and of rooms that have one.
const (
	leastDefects = 10
	leastRobust  = 3
	leastRooms   = 6
)

func TestTheTableIsTrue(t *testing.T) {
	root := moduleRoot(t)
	names, rooms, robust := map[string]bool{}, map[string]bool{}, 0
	for _, d := range Table {
		if _, err := d.Overlay(root, t.TempDir()); err != nil {
			t.Error(err)
		}
		if d.Name == "" || d.Guard == "" || d.Room == "" || d.Test == "" || names[d.Name] {
			t.Errorf("defect %q lacks something, or is there twice: %+v", d.Name, d)
		}
		if strings.HasSuffix(d.File, "_test.go") {
			t.Errorf("defect %q is in a test", d.Name)
		}
		names[d.Name], rooms[d.Room] = true, true
		if d.Robust {
			robust++
		}
	}
	if len(names) < leastDefects || robust < leastRobust || len(rooms) < leastRooms {
		t.Errorf("saw %d defects in %d rooms, %d for the robust suite", len(names), len(rooms), robust)
	}
}

func TestAnOldTextThatIsNotThereOnceIsRefused(t *testing.T) {
	root := moduleRoot(t)
	for _, d := range []Defect{
		{Name: "not there", File: "go.mod", Old: "this text is in no file", New: "x"},
		{Name: "there twice", File: "go.mod", Old: "github.com", New: "x"},
		{Name: "nothing changed", File: "go.mod", Old: "module ", New: "module "},
		{Name: "no file", File: "none.go", Old: "x", New: "y"},
	} {
		if path, err := d.Overlay(root, t.TempDir()); err == nil {
			t.Errorf("%s: was accepted, %s", d.Name, path)
		}
	}
}

func moduleRoot(t *testing.T) string {
	t.Helper()
	root, err := broker.ModuleRoot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return root
}
