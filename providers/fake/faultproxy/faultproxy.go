// Package faultproxy stands between a broker and a real guest and changes what the guest says, as a script has
// it: for tests of what a broker believes. It passes everything on that no rule is scripted for, also the
// proofs of Hello, which bind neither the connection nor what else is said. It never speaks to a guest on
// its own, and no guest and no other provider knows it.
package faultproxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"sync"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

// Kind is what a rule does to a reply.
type Kind string

// The kinds. Several rules about one reply are applied in the order of the script, up to one that replaces or
// withholds it.
const (
	Set         Kind = "set"          // Fields get these values
	Add         Kind = "add"          // Fields, which are integers, grow by these values, also below zero
	Repeat      Kind = "repeat"       // the lists Fields are repeated until they have that many elements
	Invent      Kind = "invent"       // Count statuses of jobs that nobody started are added (List)
	Pad         Kind = "pad"          // the message grows by Count bytes that no field explains
	Double      Kind = "double"       // the message is sent twice
	Stale       Kind = "stale"        // the first reply to the same call, on whatever job and machine, is sent instead
	Other       Kind = "other"        // the last reply to the call Text is sent instead
	Nonsense    Kind = "nonsense"     // Count random bytes are sent as the message
	Frames      Kind = "frames"       // Count random bytes that are no frame are put before the reply
	Refuse      Kind = "refuse"       // the call fails with the gRPC code Count and Text
	Silent      Kind = "silent"       // no reply comes; the connection goes on
	StallMidway Kind = "stall_midway" // half of the reply comes, and nothing more on this connection
	CutMidway   Kind = "cut_midway"   // half of the reply comes, and the connection is closed
	AtOnce      Kind = "at_once"      // the request's wait is taken out, so that the guest answers at once
)

// Rule is a line of the script.
type Rule struct {
	ID      string         `json:"id"`                // names the rule's count; letters, digits, _ and -
	Machine string         `json:"machine,omitempty"` // of this machine's guest; empty: of any
	Call    string         `json:"call"`              // a method of berth.guest.v1.GuestService, as "Wait"
	Kind    Kind           `json:"kind"`
	Skip    int            `json:"skip,omitempty"`   // so many replies that it could be applied in are left alone first
	Times   int            `json:"times,omitempty"`  // then it is applied this often; 0: always
	Fields  map[string]any `json:"fields,omitempty"` // by path, as "status.outcome.exit_code" or "statuses.*.job_id"
	Count   int            `json:"count,omitempty"`
	Text    string         `json:"text,omitempty"`
}

// Script is where rules are written and counted: a file in a directory that is there.
type Script struct {
	dir string

	mu    sync.Mutex
	first map[string][]byte // replies, by call
	last  map[string][]byte
	seen  os.FileInfo // of the file that rules was read from
	rules []Rule
}

const (
	scriptFile    = "rules.json"
	appliedPrefix = "applied-" // of files that hold a byte for each reply that a rule met
	// maxRemembered is the largest reply that Stale and Other repeat, in bytes.
	maxRemembered = 1 << 20
)

var plain = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// In is the script in a directory.
func In(dir string) *Script {
	return &Script{dir: dir, first: map[string][]byte{}, last: map[string][]byte{}}
}

// Write makes these the rules from the next reply on; none takes all away. Refused is what could never be
// applied: a rule about no field or no call, or without an id.
func (s *Script) Write(rules ...Rule) error {
	for _, rule := range rules {
		if err := rule.check(); err != nil {
			return fmt.Errorf("rule %q: %w", rule.ID, err)
		}
	}
	if rules == nil {
		rules = []Rule{}
	}
	data, err := json.Marshal(rules)
	if err != nil {
		return fmt.Errorf("writing the rules: %w", err)
	}
	path := filepath.Join(s.dir, scriptFile)
	if err := errors.Join(os.WriteFile(path+".new", data, 0o600), os.Rename(path+".new", path)); err != nil {
		return fmt.Errorf("writing the rules: %w", err)
	}
	return nil
}

// Wanted reports whether a script was ever written, so that connections are to go through a Link.
func (s *Script) Wanted() bool {
	_, err := os.Stat(filepath.Join(s.dir, scriptFile))
	return err == nil
}

// Applied returns how often a rule was applied.
func (s *Script) Applied(id string) (int, error) {
	rules, err := s.read()
	if err != nil {
		return 0, err
	}
	for _, rule := range rules {
		if rule.ID == id {
			return max(0, s.met(id)-rule.Skip), nil
		}
	}
	return s.met(id), nil
}

func (s *Script) met(id string) int {
	info, err := os.Stat(filepath.Join(s.dir, appliedPrefix+id))
	if err != nil {
		return 0
	}
	return int(info.Size())
}

// read returns the script as it is now. It is parsed once for each time that it was written: it may be
// large, and is read for every reply.
func (s *Script) read() ([]Rule, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	path := filepath.Join(s.dir, scriptFile)
	now, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil && s.seen != nil && os.SameFile(now, s.seen) && now.ModTime().Equal(s.seen.ModTime()) && now.Size() == s.seen.Size() {
		return s.rules, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the rules: %w", err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the rules: %w", err)
	}
	var rules []Rule
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber() // a float holds no large offset
	if err := decoder.Decode(&rules); err != nil {
		return nil, fmt.Errorf("reading the rules: %w", err)
	}
	s.seen, s.rules = now, rules // written meanwhile, it is read again: the file is another then
	return rules, nil
}

// due returns the rules that may be applied in a reply to a call.
func (s *Script) due(machine, call string) ([]Rule, error) {
	rules, err := s.read()
	var due []Rule
	for _, rule := range rules {
		if rule.Call == call && (rule.Machine == "" || rule.Machine == machine) &&
			(rule.Times == 0 || s.met(rule.ID) < rule.Skip+rule.Times) {
			due = append(due, rule)
		}
	}
	return due, err
}

// count counts a rule that a reply gives occasion to, and reports whether it is applied in this one.
func (s *Script) count(rule Rule) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	met := s.met(rule.ID)
	if rule.Times != 0 && met >= rule.Skip+rule.Times {
		return false, nil
	}
	file, err := os.OpenFile(filepath.Join(s.dir, appliedPrefix+rule.ID), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return false, err
	}
	_, err = file.Write([]byte{'.'})
	return met >= rule.Skip, errors.Join(err, file.Close())
}

// remember keeps a reply for rules of the kinds Stale and Other.
func (s *Script) remember(call string, reply []byte) {
	if len(reply) > maxRemembered {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.first[call] == nil {
		s.first[call] = bytes.Clone(reply)
	}
	s.last[call] = bytes.Clone(reply)
}

func (s *Script) remembered(rule Rule) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if rule.Kind == Stale {
		return s.first[rule.Call]
	}
	return s.last[rule.Text]
}

func (l Rule) check() error {
	if !plain.MatchString(l.ID) {
		return errors.New("its id is no name")
	}
	reply, err := replyTo(l.Call)
	if err != nil {
		return err
	}
	switch l.Kind {
	case Set, Add, Repeat:
		if len(l.Fields) == 0 {
			return errors.New("it names no field")
		}
		for path := range l.Fields {
			if err := checkPath(reply.Descriptor(), path); err != nil {
				return err
			}
		}
	case Other:
		_, err = replyTo(l.Text)
	case Invent:
		if l.Call != "List" {
			return errors.New("only the replies to List hold statuses")
		}
	case Pad, Double, Stale, Nonsense, Frames, Refuse, Silent, StallMidway, CutMidway, AtOnce:
	default:
		return fmt.Errorf("there is no kind %q", l.Kind)
	}
	return err
}

// replyTo is the type of what a guest answers to a call.
func replyTo(call string) (protoreflect.MessageType, error) {
	method := guestv1.File_berth_guest_v1_guest_proto.Services().ByName("GuestService").Methods().ByName(protoreflect.Name(call))
	if method == nil {
		return nil, fmt.Errorf("a guest has no call %q", call)
	}
	return protoregistry.GlobalTypes.FindMessageByName(method.Output().FullName())
}
