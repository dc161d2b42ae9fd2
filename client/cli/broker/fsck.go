package broker

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/present"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// FsckCommand is `berth fsck`.
func FsckCommand(p *command.Program) *cobra.Command {
	var repair bool
	cmd := &cobra.Command{
		Use:   "fsck",
		Short: "Compare the broker's records with what is there, and repair them",
		Long: `Compare the broker's records with the machines that providers have, with the output that is kept, and
with one another. Without --repair it changes nothing, and says of each finding what repairing would do.

Nothing is destroyed on one observation, nor at a provider that is not well: what can't be repaired now says
why, and when. It exits with 0 when nothing is wrong or all was repaired, and with 1 when findings remain.`,
		Example: `  berth fsck
  berth fsck --repair
  berth fsck -o json | jq -r 'select(.kind == "orphan_machine").subject'`,
		Args:              usage.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().BoolVar(&repair, "repair", false, "also repair what was found, as far as that is safe now")
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, _ []string) error {
		p.Afterwards = "the check ends with it; what was repaired stays so"
		reply, err := c.Admin().Fsck(ctx, &berthv1.FsckRequest{Repair: repair})
		if err != nil {
			return err
		}
		if err := printFindings(p, reply, repair); err != nil {
			return err
		}
		if TotalsOf(reply).Remain > 0 {
			return &command.ExitError{Code: usage.ExitFailure}
		}
		return nil
	})
	return cmd
}

// Totals count all findings, those too that are left out of the answer.
type Totals struct{ repaired, Remain, repairable int }

// TotalsOf takes the broker's word, and counts what is listed where an older broker gives none: those that
// remain are listed first, so that it is never overlooked that some do.
func TotalsOf(reply *berthv1.FsckResponse) Totals {
	var listed Totals
	for _, finding := range reply.GetFindings() {
		if finding.GetRepaired() {
			listed.repaired++
			continue
		}
		listed.Remain++
		if finding.GetRepairable() {
			listed.repairable++
		}
	}
	return Totals{
		repaired:   max(listed.repaired, int(reply.GetRepaired())),
		Remain:     max(listed.Remain, int(reply.GetRemaining())),
		repairable: max(listed.repairable, int(reply.GetRepairable())),
	}
}

func printFindings(p *command.Program, reply *berthv1.FsckResponse, repair bool) error {
	for _, finding := range reply.GetFindings() {
		if err := p.Show(finding, finding.GetSubject(), func() error { return findingBlock(p, finding) }); err != nil {
			return err
		}
	}
	if p.Output == command.OutputTable {
		return p.PrintLine(SummaryOf(reply, repair))
	}
	if reply.GetLeftOut() > 0 {
		p.PrintError("fsck", fmt.Sprintf("%d findings are not listed: an answer holds no more", reply.GetLeftOut()))
	}
	return nil
}

// findingBlock is a finding as a part of a plan that a person judges.
func findingBlock(p *command.Program, finding *berthv1.FsckFinding) error {
	words := []string{finding.GetKind(), finding.GetSubject()}
	if finding.GetProvider() != "" && finding.GetProvider() != finding.GetSubject() {
		words = append(words, "on "+finding.GetProvider())
	}
	if finding.GetAge() != nil {
		words = append(words, "for "+present.Roughly(finding.GetAge().AsDuration()))
	}
	lines := []string{strings.Join(words, " "), "  wrong:    " + finding.GetMessage()}
	switch {
	case finding.GetRepaired():
		lines = append(lines, "  repaired: "+finding.GetAction())
	case finding.GetAction() != "none":
		lines = append(lines, "  repair:   "+finding.GetAction())
	}
	if finding.GetWhyNot() != "" {
		lines = append(lines, "  not now:  "+finding.GetWhyNot())
	}
	for _, line := range lines {
		if err := p.PrintLine(present.Plain(line)); err != nil {
			return err
		}
	}
	return nil
}

// SummaryOf says in a line what was looked at and what was found.
func SummaryOf(reply *berthv1.FsckResponse, repair bool) string {
	looked := fmt.Sprintf("looked at %d sandboxes, %d machines, %d jobs, %d request ids",
		reply.GetSandboxes(), reply.GetMachines(), reply.GetJobs(), reply.GetRequests())
	if len(reply.GetFindings()) == 0 {
		return "nothing is wrong: " + looked
	}
	all, least := TotalsOf(reply), ""
	if all.repaired+all.Remain < len(reply.GetFindings())+int(reply.GetLeftOut()) {
		least = "at least " // an older broker, which counts for itself only what it lists
	}
	summary := fmt.Sprintf("%d findings", len(reply.GetFindings())+int(reply.GetLeftOut()))
	if reply.GetLeftOut() > 0 {
		summary += fmt.Sprintf(", %d of them not listed", reply.GetLeftOut())
	}
	if repair {
		summary += fmt.Sprintf(": %s%d repaired, %s%d remain", least, all.repaired, least, all.Remain)
	} else if all.repairable > 0 {
		summary += fmt.Sprintf(": `berth fsck --repair` would repair %s%d", least, all.repairable)
	}
	return summary + "; " + looked
}
