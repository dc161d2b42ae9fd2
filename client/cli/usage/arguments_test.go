package usage

import (
	"strings"
	"testing"
)

func TestTheArgumentThatIsNotUTF8IsNamed(t *testing.T) {
	err := CheckUTF8([]string{"exec", "7QK2", "--", "cat", "caf\xe9"})
	if !Is(err) || !strings.Contains(err.Error(), `argument 5, "caf\xe9", is not UTF-8`) {
		t.Errorf("got %v", err)
	}
	if err := CheckUTF8([]string{"exec", "7QK2", "--", "cat", "café", ""}); err != nil {
		t.Error(err)
	}
}
