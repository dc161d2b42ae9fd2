package launch

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// The files that name users and groups. They are read at each use: a command may change them.
const (
	passwdFile = "/etc/passwd"
	groupFile  = "/etc/group"
)

// maxAccounts bounds what is read of these files, in bytes.
const maxAccounts = 8 << 20

// account is a user to run as.
type account struct {
	name   string
	home   string
	uid    uint32
	gid    uint32
	groups []uint32
}

func (a *account) credential() *syscall.Credential {
	// Without root, groups cannot be set and need not be: the user can only be the guest's own.
	return &syscall.Credential{Uid: a.uid, Gid: a.gid, Groups: a.groups, NoSetGroups: os.Geteuid() != 0}
}

// account finds "user", "uid", "user:group" and so on, as Docker does; nil for the guest's own. A uid that no
// user has is allowed; its group is then 0. A group that is named is the only one.
func (m *Machine) account(spec string) (*account, error) {
	if spec == "" {
		spec = m.user
	}
	if spec == "" {
		return nil, nil //nolint:nilnil // no user is a real answer here
	}
	return findAccount(spec)
}

func findAccount(spec string) (*account, error) {
	userName, groupName, withGroup := strings.Cut(spec, ":")
	a, err := findUser(userName)
	if err != nil {
		return nil, err
	}
	if withGroup {
		gid, found := findGroup(groupName)
		if !found {
			return nil, &Failure{fmt.Sprintf("user_unknown: no group %q in this machine", groupName), codeNotExecutable}
		}
		a.gid, a.groups = gid, []uint32{gid}
		return a, nil
	}
	a.groups = append(supplementary(a.name), a.gid)
	slices.Sort(a.groups)
	a.groups = slices.Compact(a.groups)
	return a, nil
}

// ownHome returns the home directory of the guest's own user.
func ownHome() string {
	a, err := findUser(strconv.Itoa(os.Geteuid()))
	if err != nil || a.home == "" {
		return "/"
	}
	return a.home
}

func findUser(name string) (*account, error) {
	number, numberErr := strconv.ParseUint(name, 10, 32)
	var found *account
	eachEntry(passwdFile, 7, func(f []string) bool {
		if f[0] != name && (numberErr != nil || f[2] != name) {
			return true
		}
		uid, errUID := strconv.ParseUint(f[2], 10, 32)
		gid, errGID := strconv.ParseUint(f[3], 10, 32)
		if errUID != nil || errGID != nil {
			return true
		}
		found = &account{name: f[0], home: f[5], uid: uint32(uid), gid: uint32(gid)}
		return false
	})
	if found != nil {
		return found, nil
	}
	if numberErr != nil {
		return nil, &Failure{fmt.Sprintf("user_unknown: no user %q in this machine", name), codeNotExecutable}
	}
	return &account{home: "/", uid: uint32(number)}, nil
}

func findGroup(name string) (gid uint32, found bool) {
	if number, err := strconv.ParseUint(name, 10, 32); err == nil {
		return uint32(number), true
	}
	eachEntry(groupFile, 4, func(f []string) bool {
		number, err := strconv.ParseUint(f[2], 10, 32)
		if f[0] != name || err != nil {
			return true
		}
		gid, found = uint32(number), true
		return false
	})
	return gid, found
}

// supplementary returns the groups that list a user as a member.
func supplementary(user string) []uint32 {
	var gids []uint32
	if user == "" {
		return nil
	}
	eachEntry(groupFile, 4, func(f []string) bool {
		if number, err := strconv.ParseUint(f[2], 10, 32); err == nil && slices.Contains(strings.Split(f[3], ","), user) {
			gids = append(gids, uint32(number))
		}
		return true
	})
	return gids
}

// eachEntry calls yield with the fields of each line that has the right number of them, until it returns
// false. A file that is not there has no lines.
func eachEntry(path string, fields int, yield func([]string) bool) {
	// An image may have a link here, but a job may have put anything else in its place.
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return
	}
	defer func() { _ = file.Close() }()
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() {
		return
	}
	for lines := bufio.NewScanner(io.LimitReader(file, maxAccounts)); lines.Scan(); {
		f := strings.Split(strings.TrimSpace(lines.Text()), ":")
		if len(f) == fields && !yield(f) {
			return
		}
	}
}

// mayEnter says whether a user may enter a directory, by the mode bits of every part of its path.
func mayEnter(dir string, c *syscall.Credential) bool {
	if c.Uid == 0 {
		return true
	}
	for part := filepath.Clean(dir); ; part = filepath.Dir(part) {
		var st syscall.Stat_t
		if err := syscall.Stat(part, &st); err != nil {
			return false
		}
		bit := uint32(0o001)
		switch {
		case st.Uid == c.Uid:
			bit = 0o100
		case st.Gid == c.Gid || slices.Contains(c.Groups, st.Gid):
			bit = 0o010
		}
		if st.Mode&bit == 0 {
			return false
		}
		if part == "/" {
			return true
		}
	}
}
