// Package api holds the promises of berth.v1 that a user can see, as tests against a real broker of
// this tree on the local provider. It never looks into the broker: what it knows beyond the API is
// what a user of the host sees, files and processes.
package api
