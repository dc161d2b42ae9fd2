package mutation

// Guard is one thing in the code that a promise rests on. Its mark in the code says where it is and what the
// mutant does without it.
type Guard struct {
	Mark string // its name in the code
	Is   string // what it is
	// Package, relative to the root, and Test name the test that must fail without it.
	Package, Test string
	// Robust says that the robust suite must fail too.
	Robust bool
}

// Guards is every guard. One that is worth a line in the design is worth a line here.
var Guards = []Guard{
	{"request-id", "a request that is made again is not done again", "daemon/lifecycle", "TestFiftyCallersOfOneRequestShareOneSandbox", true},
	{"body-hash", "another body under a used request id is refused", "daemon/lifecycle", "TestARequestIDBelongsToOneBody", true},
	{"orphan-grace", "a machine without a record is not destroyed before its grace is over", "daemon/reconcile", "TestAMachineWithoutARecordIsDestroyedWhenItWasSeenTwiceAGraceApart", false},
	{"boot-fence", "a reservation of before the guest's restart is not begun", "providers/guest", "TestRequestsThatMakeNoSenseAreRefused", false},
	{"subscribe-before-read", "whoever waits for a job subscribes before reading it", "daemon/jobs", "TestAChangeBetweenTheReadAndTheWaitIsSeen", false},
	{"start-deadline", "a job is not started after its deadline", "daemon/jobs", "TestAJobWhoseDeadlineIsOverIsNotStarted", false},
	{"record-behind-answer", "the record of an attached command is written behind its answer", "daemon/jobs", "TestAnAnsweredCommandIsKnownAfterARestart", true},
	{"forget-after-commit", "a guest forgets an attached command only after its end is in the ledger", "daemon/jobs", "TestAnAcknowledgedCommandIsForgottenOnlyAfterItsRecordIsInTheLedger", false},
	{"exclusive-entry", "a job whose entry is there is not begun again", "providers/guest/record", "TestAJobIsCreatedOnce", false},
	{"tombstone", "a forgotten job does not begin again", "providers/guest", "TestAForgottenJobNeverBeginsAgain", false},
	{"fsync-of-outcome", "an outcome is on disk before it is put in place", "providers/guest/record", "TestNothingIsDoneWhenItCannotBePutOnDisk", false},
	{"probe-after-ambiguity", "a step with an ambiguous answer is probed again", "daemon/lifecycle", "TestACreateTakesEachAnswerOfItsProviderForWhatItIs", false},
	{"destroy-is-never-undone", "a destroy is never given up", "daemon/operation", "TestWhatHasNoUndoIsNeverGivenUp", false},
	{"destroyed-is-for-good", "a destroyed sandbox can't be resumed", "daemon/lifecycle", "TestCallsAreHeldToTheirConditions", true},
	{"partial-is-gone", "what is left of a booted machine is no machine", "daemon/lifecycle", "TestAMachineThatIsHalfDestroyedWhileItIsSetUpFailsItsCreateAtOnce", false},
	{"observed-twice", "a machine that was not found once is not given up", "daemon/reconcile", "TestAMachineThatVanishedIsLostWhenThatWasSeenTwice", false},
	{"record-before-report", "an outcome is written before it is reported", "providers/guest", "TestARestartKeepsOutcomesAndLosesWhatIsUnknown", false},
	{"bounded-drain", "a child that holds the output does not delay the outcome", "providers/guest/supervise", "TestAChildThatIsNeverSilentHoldsUpNoOutcome", false},
	{"busy-outlet", "a byte between the pipe and the spool is no silence", "providers/guest/stdio", "TestAByteOnItsWayIsNoSilence", false},
	{"input-offset", "input that is sent again is not taken again", "providers/guest", "TestInputIsTakenOnceAndInOrder", true},
	{"sibling-containment", "the kill of a job spares its sibling", "providers/guest/contain", "TestATreeIsKilledWholeAndItsNeighbourIsNot", false},
	{"signals-of-jobs", "the first process of a machine drops the signals that its jobs send", "providers/guest", "TestAsPID1ItSeesOnlyItsMachineReapsItsOrphansAndObeysNoJob", false},
	{"rerun-of-commit", "the writes of a change that failed are not committed with the others", "daemon/store", "TestFunctionsAreRunAgainWithoutTheOneThatFailed", false},
	{"reserve", "on a full disk what ends something is written, and nothing else", "daemon/store", "TestOnAFullDiskWhatEndsSomethingIsWrittenAndNothingElse", false},
	{"hello-proof", "a peer without the machine's token is not spoken to", "daemon/guestlink", "TestAPeerThatIsNotTheGuestIsNotSpokenTo", false},
}
