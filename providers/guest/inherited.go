package guest

import (
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers/guest/signals"
)

const (
	// defaultUmask is that of a fresh login.
	defaultUmask = 0o022
	// stackBytes is the soft limit of a stack, as Linux sets it.
	stackBytes = 8 << 20
	// reservedThreads are created at boot: a guest that cannot create a thread dies, and a job may use up the
	// machine's processes.
	reservedThreads = 12
	// reserveTime is how long each of them blocks, so that all exist at the same time.
	reserveTime = 20 * time.Millisecond
)

// resetInherited replaces what the process that started the guest had changed for itself, since every job
// inherits it: ignored signals, umask, nice value and limits. The limits of a container are its engine's, and
// stay.
func resetInherited(config *guestv1.BootConfig, log *slog.Logger) {
	syscall.Umask(defaultUmask)
	for _, reset := range []func() error{resetSignals, resetNice} {
		if err := reset(); err != nil {
			log.Warn("jobs inherit a property of the process that started the guest", "error", err)
		}
	}
	if os.Getpid() != 1 || config.GetMountProc() {
		resetLimits()
	}
}

// UnblockSignals starts the program again if signals are blocked, which a job would inherit and the runtime
// keeps for all its threads. It comes first in a program.
func UnblockSignals() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var blocked, none unix.Sigset_t
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &none, &blocked); err != nil {
		return fmt.Errorf("unblock signals: %w", err)
	}
	if blocked == none {
		return nil
	}
	return fmt.Errorf("start again without blocked signals: %w", syscall.Exec("/proc/self/exe", os.Args, os.Environ()))
}

// resetSignals handles the signals that are ignored, by dropping them: a handler, unlike SIG_IGN, ends with the
// exec of a job.
func resetSignals() error {
	ignored, err := ignoredSignals()
	if err != nil {
		return err
	}
	dropped := make(chan os.Signal, 1) // which is never received from
	for _, number := range ignored {
		signal.Notify(dropped, number)
	}
	// The runtime installs no handler for those that C libraries keep to themselves, 32 to 34.
	if ignored, err = ignoredSignals(); err != nil {
		return err
	}
	for _, number := range ignored {
		if err := signals.Dispose(number, signals.Default); err != nil {
			return fmt.Errorf("reset %v: %w", number, err)
		}
	}
	return nil
}

// ignoredSignals lists the signals that this process ignores.
func ignoredSignals() ([]syscall.Signal, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return nil, fmt.Errorf("read the ignored signals: %w", err)
	}
	var ignored []syscall.Signal
	for line := range strings.Lines(string(status)) {
		digits, found := strings.CutPrefix(line, "SigIgn:")
		if !found {
			continue
		}
		mask, err := strconv.ParseUint(strings.TrimSpace(digits), 16, 64)
		if err != nil {
			return nil, fmt.Errorf("read the ignored signals: %w", err)
		}
		for number := 1; number <= signalCount; number++ {
			if mask&(1<<(number-1)) != 0 {
				ignored = append(ignored, syscall.Signal(number))
			}
		}
	}
	return ignored, nil
}

// Linux has 64 signals on every architecture that Go knows but MIPS.
const signalCount = 64

// resetNice sets the nice value of every thread to 0.
func resetNice() error {
	threads, err := filepath.Glob("/proc/self/task/*")
	if err != nil {
		return fmt.Errorf("list the guest's threads: %w", err)
	}
	for _, thread := range threads {
		id, err := strconv.Atoi(filepath.Base(thread))
		if err != nil {
			continue
		}
		if err := unix.Setpriority(unix.PRIO_PROCESS, id, 0); err != nil && err != unix.ESRCH {
			return fmt.Errorf("reset the nice value: %w", err)
		}
	}
	return nil
}

// resetLimits lifts limits, as far as the guest may. The limit of open files stays.
func resetLimits() {
	unlimited := uint64(unix.RLIM_INFINITY)
	for resource, soft := range map[int]uint64{
		unix.RLIMIT_CPU: unlimited, unix.RLIMIT_FSIZE: unlimited, unix.RLIMIT_DATA: unlimited, unix.RLIMIT_AS: unlimited,
		unix.RLIMIT_RSS: unlimited, unix.RLIMIT_STACK: stackBytes, unix.RLIMIT_CORE: 0,
	} {
		if unix.Setrlimit(resource, &unix.Rlimit{Cur: soft, Max: unlimited}) == nil {
			continue
		}
		var limit unix.Rlimit
		if unix.Getrlimit(resource, &limit) == nil {
			limit.Cur = min(soft, limit.Max)
			_ = unix.Setrlimit(resource, &limit)
		}
	}
}

// reserveThreads has the runtime create threads, which it keeps.
func reserveThreads() {
	var blocked sync.WaitGroup
	for range reservedThreads {
		blocked.Go(func() {
			pause := unix.NsecToTimespec(int64(reserveTime))
			_ = unix.Nanosleep(&pause, nil)
		})
	}
	blocked.Wait()
}
