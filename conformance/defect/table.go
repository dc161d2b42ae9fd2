package defect

// Table is every defect. A guard that is worth a line in the design is worth a line here.
var Table = []Defect{
	{
		Name: "a request that is made again is done again", Guard: "the record of a request id",
		File: "daemon/lifecycle/call.go",
		Old:  "return record.GetResultId(), nil", New: `return "", nil`,
		Room: "daemon/lifecycle", Test: "TestFiftyCallersOfOneRequestShareOneSandbox", Robust: true,
	},
	{
		Name: "another body under a used request id is taken for the same", Guard: "the hash of a request's body",
		File: "daemon/lifecycle/call.go",
		Old:  "|| !bytes.Equal(record.GetBodyHash(), c.BodyHash) {", New: "|| bytes.Equal(record.GetBodyHash(), []byte{0}) {",
		Room: "daemon/lifecycle", Test: "TestARequestIDBelongsToOneBody", Robust: true,
	},
	{
		Name: "an ambiguous answer of a provider is taken for a refusal", Guard: "the probe before a step is tried again",
		File: "daemon/lifecycle/operation.go",
		Old:  "errors.Is(err, providers.ErrAmbiguous) {\n\t\treturn false", New: "errors.Is(err, providers.ErrAmbiguous) {\n\t\treturn true",
		Room: "daemon/lifecycle", Test: "TestACreateTakesEachAnswerOfItsProviderForWhatItIs",
	},
	{
		Name: "a destroy that is refused is given up", Guard: "a destroy is never undone",
		File: "daemon/lifecycle/operation.go",
		Old:  `return operation.GetUndoing() == nil && undoStep[operation.GetKind()] != ""`, New: `return operation.GetUndoing() == nil`,
		Room: "daemon/lifecycle", Test: "TestADestroyIsNeverGivenUp",
	},
	{
		Name: "a destroyed sandbox can be resumed", Guard: "DESTROYED is for good",
		File: "daemon/lifecycle/lifecycle.go",
		Old:  "case berthv1.SandboxState_SANDBOX_STATE_STOPPED, berthv1.SandboxState_SANDBOX_STATE_SUSPENDED:\n\t\tdefault:",
		New:  "case berthv1.SandboxState_SANDBOX_STATE_STOPPED, berthv1.SandboxState_SANDBOX_STATE_SUSPENDED, berthv1.SandboxState_SANDBOX_STATE_DESTROYED:\n\t\tdefault:",
		Room: "daemon/lifecycle", Test: "TestCallsAreHeldToTheirConditions", Robust: true,
	},
	{
		Name: "a machine that was not found once is given up", Guard: "the rule of two sightings",
		File: "daemon/reconcile/reconcile.go",
		Old:  "s.seen[machineID] = sighting{verdict, s.opts.Now()}\n\t\treturn false", New: "s.seen[machineID] = sighting{verdict, s.opts.Now()}\n\t\treturn true",
		Room: "daemon/reconcile", Test: "TestAMachineThatVanishedIsLostWhenThatWasSeenTwice",
	},
	{
		Name: "a machine without a record is destroyed at once", Guard: "the grace of an orphan",
		File: "daemon/reconcile/reconcile.go",
		Old:  "return before.since, now.Sub(before.since) >= orphanGrace", New: "return before.since, !before.since.IsZero()",
		Room: "daemon/reconcile", Test: "TestAMachineWithoutARecordIsDestroyedWhenItWasSeenTwiceAGraceApart",
	},
	{
		Name: "what ends between the look and the wait is waited for", Guard: "subscribe before the look",
		File: "daemon/jobs/jobs.go",
		Old:  "\t\tif err := s.machineStopped(job); err != nil {\n\t\t\treturn job, err\n\t\t}\n\t\tselect {\n\t\tcase <-changed:",
		New:  "\t\tif err := s.machineStopped(job); err != nil {\n\t\t\treturn job, err\n\t\t}\n\t\tstop()\n\t\tchanged, stop = s.news.about(jobID)\n\t\tselect {\n\t\tcase <-changed:",
		Room: "daemon/jobs", Test: "TestAChangeBetweenTheLookAndTheWaitIsHeard",
	},
	{
		Name: "a job is started hours after it was asked for", Guard: "the start deadline",
		File: "daemon/jobs/follow.go",
		Old:  "case s.opts.Now().After(job.GetStartDeadline().AsTime()):", New: "case false:",
		Room: "daemon/jobs", Test: "TestAJobWhoseDeadlineIsOverIsNotStarted",
	},
	{
		Name: "an answered command is forgotten", Guard: "the record behind an attached command's answer",
		File: "daemon/jobs/run.go",
		Old:  `return tx.PutJob(record, "job.done", describeOutcome(record.GetOutcome()))`, New: "return nil",
		Room: "daemon/jobs", Test: "TestAnAnsweredCommandIsKnownAfterARestart", Robust: true,
	},
	{
		Name: "a reservation of before the guest's restart is begun", Guard: "the boot fence",
		File: "providers/guest/supervise/begin.go",
		Old:  `case r.GetBootId() != "" && r.GetBootId() != s.BootID:`, New: "case false:",
		Room: "providers/guest", Test: "TestRequestsThatMakeNoSenseAreRefused",
	},
	{
		Name: "a job whose entry is there is begun again", Guard: "the exclusive entry of a job",
		File: "providers/guest/record/record.go",
		Old:  "if err := unix.Mkdir(dir, 0o700); err != nil {\n\t\tif errors.Is(err, fs.ErrExist) {\n\t\t\treturn ErrExists\n\t\t}",
		New:  "if err := unix.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {",
		Room: "providers/guest/record", Test: "TestAJobIsCreatedOnce",
	},
	{
		Name: "a forgotten job begins again", Guard: "the tombstone of a forgotten job",
		File: "providers/guest/supervise/begin.go",
		Old:  "case errors.Is(err, record.ErrForgotten):", New: "case false:",
		Room: "providers/guest", Test: "TestAForgottenJobNeverBeginsAgain",
	},
	{
		Name: "an outcome is put in place before it is on disk", Guard: "the fsync of an exit status",
		File: "providers/guest/record/record.go",
		Old:  "\t\terr = file.Sync()", New: "\t\terr = nil",
		Room: "providers/guest/record", Test: "TestNothingIsDoneWhenItCannotBePutOnDisk",
	},
	{
		Name: "an outcome is told and not written", Guard: "the record of an exit status, before it is told",
		File: "providers/guest/supervise/job.go",
		Old:  "if err := s.persist(status); err != nil {", New: "if err := error(nil); err != nil {",
		Room: "providers/guest", Test: "TestARestartKeepsOutcomesAndLosesWhatIsUnknown",
	},
	{
		Name: "a child that holds the output holds up the outcome", Guard: "the bounded drain after the exit",
		File: "providers/guest/supervise/drain.go",
		Old:  "if quietFor >= drainSilence || !now.Before(deadline) {", New: "if quietFor >= drainSilence {",
		Room: "providers/guest/supervise", Test: "TestAChildThatIsNeverSilentHoldsUpNoOutcome",
	},
	{
		Name: "a byte between the pipe and the spool is taken for silence", Guard: "bytes that are being read count as on their way",
		File: "providers/guest/supervise/job.go",
		Old:  "\t\toutlet.busy.Store(true)\n", New: "",
		Room: "providers/guest/supervise", Test: "TestAByteOnItsWayIsNoSilence",
	},
	{
		Name: "input that is sent again is taken again", Guard: "the offset of input",
		File: "providers/guest/supervise/input.go",
		Old:  "data = data[in.received-offset:]", New: "data = data[:]",
		Room: "providers/guest", Test: "TestInputIsTakenOnceAndInOrder", Robust: true,
	},
	{
		Name: "the kill of a job takes its sibling", Guard: "the containment of siblings",
		File: "providers/guest/contain/group.go",
		Old:  `return g.tag == t || g.jobID == "" && g.means.tags.ours(t)`, New: "return g.means.tags.ours(t)",
		Room: "providers/guest/contain", Test: "TestATreeIsKilledWholeAndItsNeighbourIsNot",
	},
	{
		Name: "the writes of a change that failed are committed with the others", Guard: "the rerun of a shared commit",
		File: "daemon/store/writer.go",
		Old:  "if tx.writes > before {", New: "if false {",
		Room: "daemon/store", Test: "TestFunctionsAreRunAgainWithoutTheOneThatFailed",
	},
	{
		Name: "a peer without the machine's token is spoken to", Guard: "the proof in a guest's hello",
		File: "daemon/guestlink/guestlink.go",
		Old:  `case !hmac.Equal(hello.GetProof(), proof(k.target.Token, "berth guest", nonce)):`, New: `case hmac.Equal(hello.GetProof(), nil):`,
		Room: "daemon/guestlink", Test: "TestAPeerThatIsNotTheGuestIsNotSpokenTo",
	},
}
