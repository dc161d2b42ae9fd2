package reverse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/providers"
)

// strangerVariable has this program dial, again and again, what it names, as another process of a machine
// would, until it is killed.
const strangerVariable = "BERTH_TEST_STRANGER_DIALS"

func TestMain(m *testing.M) {
	if path := os.Getenv(strangerVariable); path != "" {
		stranger(path)
	}
	goleak.VerifyTestMain(m)
}

func stranger(path string) {
	for {
		conn, err := net.Dial("unix", path)
		if err == nil {
			_, _ = io.WriteString(conn, "stranger\n")
			time.AfterFunc(time.Second, func() { _ = conn.Close() }) // idle meanwhile
		}
		time.Sleep(time.Millisecond)
	}
}

func listen(t *testing.T, dir string) *Dialer {
	t.Helper()
	dialer, err := Listen(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dialer.Close(); err != nil {
			t.Error(err)
		}
	})
	return dialer
}

// guestDials connects as a guest does and says who it is.
func guestDials(t *testing.T, dir, name string) net.Conn {
	t.Helper()
	conn, err := net.Dial("unix", filepath.Join(dir, SocketName))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, name+"\n"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func dial(t *testing.T, dialer *Dialer) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	conn, err := dialer.Dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func nameOf(t *testing.T, conn net.Conn) string {
	t.Helper()
	_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	var name strings.Builder
	one := make([]byte, 1)
	for {
		if _, err := io.ReadFull(conn, one); err != nil {
			t.Fatal(err)
		}
		if one[0] == '\n' {
			return name.String()
		}
		name.WriteByte(one[0])
	}
}

// accepts waits until the accept loop has taken so many connections that wait.
func accepts(t *testing.T, dialer *Dialer, want int) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		dialer.mu.Lock()
		got := len(dialer.waiting)
		dialer.mu.Unlock()
		if got == want {
			return
		}
	}
	t.Fatalf("%d connections never came to wait", want)
}

func TestTheSocketIsItsOwnersAlone(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	listen(t, dir)
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, SocketName): 0o600} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := info.Mode().Perm(); got != want {
			t.Errorf("%s has mode %o, want %o", path, got, want)
		}
	}
}

func TestAPathThatIsTooLongIsRefusedInWords(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("x", 120))
	path := filepath.Join(dir, SocketName)
	_, err := Listen(dir, nil)
	if !errors.Is(err, providers.ErrRefused) {
		t.Fatalf("got %v, want ErrRefused", err)
	}
	for _, want := range []string{path, fmt.Sprint(len(path)), "107", "shorter runtime directory"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("the directory was made all the same")
	}
}

func TestAPathOfExactlyTheLimitWorks(t *testing.T) {
	base, err := os.MkdirTemp("", "b") // t.TempDir is long already
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(base) })
	fill := 107 - len(base) - len("/"+"/"+SocketName)
	dir := filepath.Join(base, strings.Repeat("x", fill))
	dialer := listen(t, dir)
	guestDials(t, dir, "me")
	if got := nameOf(t, dial(t, dialer)); got != "me" {
		t.Errorf("got %q", got)
	}
}

func TestAFileThatIsNoSocketIsLeftAlone(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, SocketName)
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(dir, nil); err == nil || !strings.Contains(err.Error(), path) {
		t.Fatalf("got %v, want an error that names %s", err, path)
	}
	if content, err := os.ReadFile(path); err != nil || string(content) != "precious" {
		t.Errorf("the file is gone: %q, %v", content, err)
	}
}

func TestDialHandsOutTheNewestConnectionThatIsAlive(t *testing.T) {
	dir := t.TempDir()
	dialer := listen(t, dir)
	guestDials(t, dir, "first")
	guestDials(t, dir, "second")
	dead := guestDials(t, dir, "third")
	accepts(t, dialer, 3)
	_ = dead.Close() // it had written before, so a peek would still see a byte
	if got := nameOf(t, dial(t, dialer)); got != "second" {
		t.Errorf("got %q, want second", got)
	}
	if got := nameOf(t, dial(t, dialer)); got != "first" {
		t.Errorf("got %q, want first", got)
	}
}

func TestOnlyTheNewestFourWait(t *testing.T) {
	dir := t.TempDir()
	dialer := listen(t, dir)
	conns := map[string]net.Conn{}
	for i := range 7 {
		name := fmt.Sprint(i)
		conns[name] = guestDials(t, dir, name)
	}
	for _, name := range []string{"0", "1", "2"} {
		_ = conns[name].SetReadDeadline(time.Now().Add(5 * time.Second))
		if _, err := conns[name].Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("connection %s was not closed: %v", name, err)
		}
	}
	for _, want := range []string{"6", "5", "4", "3"} {
		if got := nameOf(t, dial(t, dialer)); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestDialWaitsForTheGuest(t *testing.T) {
	dir := t.TempDir()
	dialer := listen(t, dir)
	got := make(chan net.Conn)
	go func() {
		conn, err := dialer.Dial(context.Background())
		if err != nil {
			t.Error(err)
		}
		got <- conn
	}()
	guestDials(t, dir, "late")
	conn := <-got
	defer func() { _ = conn.Close() }()
	if name := nameOf(t, conn); name != "late" {
		t.Errorf("got %q", name)
	}
}

func TestADialThatGivesUpLosesNoConnection(t *testing.T) {
	dir := t.TempDir()
	dialer := listen(t, dir)
	for i := range 200 {
		ctx, cancel := context.WithCancel(t.Context())
		gaveUp := make(chan net.Conn)
		go func() {
			conn, err := dialer.Dial(ctx)
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			gaveUp <- conn
		}()
		name := fmt.Sprint(i)
		guest := guestDials(t, dir, name)
		cancel()
		conn := <-gaveUp
		if conn == nil {
			conn = dial(t, dialer)
		}
		if got := nameOf(t, conn); got != name {
			t.Fatalf("got %q, want %q", got, name)
		}
		_ = conn.Close()
		_ = guest.Close()
	}
}

func TestConcurrentDialsEachGetTheirOwn(t *testing.T) {
	dir := t.TempDir()
	dialer := listen(t, dir)
	const dials = 64
	names := make(chan string, dials)
	var all sync.WaitGroup
	for range dials {
		all.Go(func() { names <- nameOf(t, dial(t, dialer)) })
	}
	for len(names) < dials { // more than four may come before anybody dials: those are dropped
		guestDials(t, dir, fmt.Sprint(time.Now().UnixNano()))
		time.Sleep(time.Millisecond)
	}
	all.Wait()
	seen := map[string]bool{}
	for range dials {
		name := <-names
		if seen[name] {
			t.Errorf("%s was handed out twice", name)
		}
		seen[name] = true
	}
}

func TestCloseEndsTheDialerAndNotWhatItHandedOut(t *testing.T) {
	dir := t.TempDir()
	dialer := listen(t, dir)
	handedOut := guestDials(t, dir, "handed out")
	mine := dial(t, dialer)
	nameOf(t, mine)
	waits := guestDials(t, dir, "waits")
	dials := make(chan error)
	if err := dialer.Close(); err != nil {
		t.Fatal(err)
	}
	if err := dialer.Close(); err != nil {
		t.Errorf("the second Close: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, SocketName)); err == nil {
		t.Error("the socket is still there")
	}
	_ = waits.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := waits.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the waiting connection is still open: %v", err)
	}
	go func() {
		_, err := dialer.Dial(context.Background())
		dials <- err
	}()
	if err := <-dials; !errors.Is(err, net.ErrClosed) {
		t.Errorf("a dial after Close: %v", err)
	}
	if _, err := io.WriteString(handedOut, "still here\n"); err != nil {
		t.Fatal(err)
	}
	if got := nameOf(t, mine); got != "still here" {
		t.Errorf("got %q", got)
	}
}

func TestCloseWakesADialThatWaits(t *testing.T) {
	dialer := listen(t, t.TempDir())
	failed := make(chan error)
	go func() {
		_, err := dialer.Dial(context.Background())
		failed <- err
	}()
	time.Sleep(10 * time.Millisecond)
	_ = dialer.Close()
	if err := <-failed; !errors.Is(err, net.ErrClosed) {
		t.Errorf("got %v, want net.ErrClosed", err)
	}
}

func TestAfterACrashTheSocketIsListenedOnAgain(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, SocketName)
	crashed, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	crashed.SetUnlinkOnClose(false)
	_ = crashed.Close() // a killed process leaves its socket behind
	dialer := listen(t, dir)
	guestDials(t, dir, "again")
	if got := nameOf(t, dial(t, dialer)); got != "again" {
		t.Errorf("got %q", got)
	}
}

func TestALaterListenerKeepsItsSocketWhenTheEarlierOneCloses(t *testing.T) {
	dir := t.TempDir()
	earlier := listen(t, dir)
	later := listen(t, dir)
	if err := earlier.Close(); err != nil {
		t.Fatal(err)
	}
	guestDials(t, dir, "hello")
	if got := nameOf(t, dial(t, later)); got != "hello" {
		t.Errorf("got %q", got)
	}
}

func TestOnlyTheGuestsProcessIsListenedTo(t *testing.T) {
	dir := t.TempDir()
	var asked atomic.Int32
	dialer, err := Listen(dir, func() (int, error) {
		if asked.Add(1) == 1 {
			return 0, errors.New("nobody knows yet")
		}
		return os.Getpid(), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dialer.Close() }()
	other := exec.Command(os.Args[0])
	other.Env = append(os.Environ(), strangerVariable+"="+filepath.Join(dir, SocketName))
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Process.Kill(); _ = other.Wait() }()

	// The guest redials until somebody knows which process it is.
	begun := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() {
		for ctx.Err() == nil {
			conn, err := net.Dial("unix", filepath.Join(dir, SocketName))
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, "guest\n")
			_, _ = conn.Read(make([]byte, 1)) // until it is closed
			_ = conn.Close()
		}
	}()
	for range 5 {
		conn, err := dialer.Dial(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if who := nameOf(t, conn); who != "guest" {
			t.Errorf("the dial reached the %s", who)
		}
		_ = conn.Close()
	}
	if most := int32(time.Since(begun)/askInterval) + 2; asked.Load() > most {
		t.Errorf("the stranger had the provider asked %d times in %s", asked.Load(), time.Since(begun))
	}
}

func TestWhereNobodyCanSayWhoTheGuestIsEveryoneIsLetThroughToHello(t *testing.T) {
	dir := t.TempDir()
	dialer, err := Listen(dir, func() (int, error) { return 0, nil })
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dialer.Close() }()
	guestDials(t, dir, "anybody")
	if who := nameOf(t, dial(t, dialer)); who != "anybody" {
		t.Errorf("the dial reached %q", who)
	}
}
