package launch

import (
	"fmt"
	"strings"
)

// Owner returns the ids of a user as a command names it: name or uid, optionally ":" and a group. The
// error is a *Failure.
func Owner(user string) (uid, gid int, err error) {
	userName, groupName, withGroup := strings.Cut(user, ":")
	a, err := findUser(userName)
	if err != nil {
		return 0, 0, err
	}
	if withGroup {
		group, found := findGroup(groupName)
		if !found {
			return 0, 0, &Failure{fmt.Sprintf("user_unknown: no group %q in this machine", groupName), codeNotExecutable}
		}
		a.gid = group
	}
	return int(a.uid), int(a.gid), nil
}
