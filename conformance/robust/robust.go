// Package robust holds what random traffic against a broker that is killed again and again is recorded
// as, and what must be true of every such record: a history of calls, replies, kills and faults, the
// plan that says what each command does, and the checks of the one against the other. It never talks to
// a broker; its tests do, see README.md.
package robust
