// Package restore holds the promises about backups and the check, as tests against a real broker of this
// tree: a broker that is started on a backup finds again what was there, brings nothing back, and
// destroys nothing before its time. It never looks into the broker: it knows its command line, its API
// and what lies in its state directory.
package restore
