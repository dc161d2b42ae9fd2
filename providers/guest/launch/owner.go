package launch

// Owner returns the ids of a user as a command names it: name or uid, optionally ":" and a group. The
// error is a *Failure.
func Owner(user string) (uid, gid int, err error) {
	a, err := findAccount(user)
	if err != nil {
		return 0, 0, err
	}
	return int(a.uid), int(a.gid), nil
}
