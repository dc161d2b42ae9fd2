//go:build !race

package guest

// maxGuestMiB bounds the memory of a guest, its program aside, which the tests' is larger than.
const maxGuestMiB = 24
