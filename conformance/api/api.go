// Package api holds the promises of berth.v1 that a user can see, as tests against a real broker of
// this tree on one provider at a time. What is promised of every command is one table, in
// table_test.go. It never looks into the broker: what it knows beyond the API is what a user of the host
// or of the engine sees, files, processes and containers.
package api
