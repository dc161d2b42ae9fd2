// Package byzantine lets guests lie to a real broker, and checks that whatever they say the broker goes on,
// serves every other machine, hands out no outcome and no byte that cannot be, and says what it does not
// know. It knows the broker by its programs, its API and the harness of the fake provider.
package byzantine
