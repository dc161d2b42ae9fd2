//go:build race

package guest

// maxGuestMiB is as much more as the race detector takes: 5 to 10 times, by its documentation.
const maxGuestMiB = 10 * 24
