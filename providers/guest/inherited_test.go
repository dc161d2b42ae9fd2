package guest

import (
	"strings"
	"syscall"
	"testing"

	"github.com/berth-sandbox/berth/conformance/testenv"
	"github.com/berth-sandbox/berth/providers/guest/signals"
)

func TestAJobInheritsNothingOfWhoStartedTheGuest(t *testing.T) {
	testenv.Root(t)                                     // to raise limits and the nice value
	for _, reserved := range []syscall.Signal{32, 34} { // no program can ignore them by its C library
		if err := signals.Dispose(reserved, signals.Ignore); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = signals.Dispose(reserved, signals.Default) })
	}
	m := bootAs(t, manner{script: `
		trap '' HUP INT QUIT USR1 USR2 PIPE CHLD TSTP RTMIN+3
		umask 077
		ulimit -S -f 8; ulimit -S -t 1000; ulimit -S -s 1024; ulimit -S -v 8000000
		renice -n 7 $$ >/dev/null
		exec perl -MPOSIX -e 'sigprocmask(SIG_BLOCK, POSIX::SigSet->new(SIGTERM, SIGUSR1, SIGALRM)); exec @ARGV' "$0"`})
	for script, want := range map[string]string{
		"grep -E '^Sig(Ign|Blk)' /proc/self/status | tr -s '\\t' ' '": "SigBlk: 0000000000000000\nSigIgn: 0000000000000000\n",
		"umask":                       "0022\n",
		"nice":                        "0\n",
		"ulimit -f":                   "unlimited\n",
		"ulimit -t":                   "unlimited\n",
		"ulimit -s":                   "8192\n",
		"ulimit -v":                   "unlimited\n",
		"ulimit -c":                   "0\n",
		"kill -HUP $$; echo survived": "",
	} {
		if response := m.run(shell(script)); string(response.GetStdout().GetHead()) != want {
			t.Errorf("%s: %q, want %q, %v", strings.TrimSpace(script), response.GetStdout().GetHead(), want, response.GetStatus().GetOutcome())
		}
	}
}
