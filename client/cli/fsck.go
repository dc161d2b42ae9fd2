package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func (p *program) fsckCommand() *cobra.Command {
	var repair bool
	cmd := &cobra.Command{
		Use:   "fsck",
		Short: "Compare the broker's records with what is there, and mend them",
		Long: `Compare the broker's records with the machines that providers have, with the output that is kept, and
with one another. Without --repair it changes nothing, and says of each finding what repairing would do.

Nothing is destroyed on one sighting, nor at a provider that is not well: what can't be mended now says
why, and when. It exits with 0 when nothing is wrong or all was mended, and with 1 when findings remain.`,
		Example: `  berth fsck
  berth fsck --repair
  berth fsck -o json | jq -r 'select(.kind == "orphan_machine").subject'`,
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().BoolVar(&repair, "repair", false, "also mend what was found, as far as that is safe now")
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, _ []string) error {
		p.afterwards = "the check ends with it; what was mended stays so"
		reply, err := c.Admin().Fsck(ctx, &berthv1.FsckRequest{Repair: repair})
		if err != nil {
			return err
		}
		if err := p.showFindings(reply, repair); err != nil {
			return err
		}
		if totalsOf(reply).remain > 0 {
			return &exitError{code: exitFailure}
		}
		return nil
	})
	return cmd
}

// totals count all findings, those too that are left out of the answer.
type totals struct{ mended, remain, mendable int }

// totalsOf takes the broker's word, and counts what is listed where an older broker gives none: those that
// remain are listed first, so that it is never overlooked that some do.
func totalsOf(reply *berthv1.FsckResponse) totals {
	var listed totals
	for _, finding := range reply.GetFindings() {
		if finding.GetRepaired() {
			listed.mended++
			continue
		}
		listed.remain++
		if finding.GetRepairable() {
			listed.mendable++
		}
	}
	return totals{
		mended:   max(listed.mended, int(reply.GetRepaired())),
		remain:   max(listed.remain, int(reply.GetRemaining())),
		mendable: max(listed.mendable, int(reply.GetRepairable())),
	}
}

func (p *program) showFindings(reply *berthv1.FsckResponse, repair bool) error {
	for _, finding := range reply.GetFindings() {
		if err := p.show(finding, finding.GetSubject(), func() error { return p.findingBlock(finding) }); err != nil {
			return err
		}
	}
	if p.output == outputTable {
		return p.printLine(summaryOf(reply, repair))
	}
	if reply.GetLeftOut() > 0 {
		p.complain("fsck", fmt.Sprintf("%d findings are not listed: an answer holds no more", reply.GetLeftOut()))
	}
	return nil
}

// findingBlock is a finding as a part of a plan that a person judges.
func (p *program) findingBlock(finding *berthv1.FsckFinding) error {
	words := []string{finding.GetKind(), finding.GetSubject()}
	if finding.GetProvider() != "" && finding.GetProvider() != finding.GetSubject() {
		words = append(words, "on "+finding.GetProvider())
	}
	if finding.GetAge() != nil {
		words = append(words, "for "+roughly(finding.GetAge().AsDuration()))
	}
	lines := []string{strings.Join(words, " "), "  wrong:   " + finding.GetMessage()}
	switch {
	case finding.GetRepaired():
		lines = append(lines, "  mended:  "+finding.GetAction())
	case finding.GetAction() != "none":
		lines = append(lines, "  repair:  "+finding.GetAction())
	}
	if finding.GetWhyNot() != "" {
		lines = append(lines, "  not now: "+finding.GetWhyNot())
	}
	for _, line := range lines {
		if err := p.printLine(plain(line)); err != nil {
			return err
		}
	}
	return nil
}

func summaryOf(reply *berthv1.FsckResponse, repair bool) string {
	looked := fmt.Sprintf("looked at %d sandboxes, %d machines, %d jobs, %d request ids",
		reply.GetSandboxes(), reply.GetMachines(), reply.GetJobs(), reply.GetRequests())
	if len(reply.GetFindings()) == 0 {
		return "nothing is wrong: " + looked
	}
	all, least := totalsOf(reply), ""
	if all.mended+all.remain < len(reply.GetFindings())+int(reply.GetLeftOut()) {
		least = "at least " // an older broker, which counts for itself only what it lists
	}
	summary := fmt.Sprintf("%d findings", len(reply.GetFindings())+int(reply.GetLeftOut()))
	if reply.GetLeftOut() > 0 {
		summary += fmt.Sprintf(", %d of them not listed", reply.GetLeftOut())
	}
	if repair {
		summary += fmt.Sprintf(": %s%d mended, %s%d remain", least, all.mended, least, all.remain)
	} else if all.mendable > 0 {
		summary += fmt.Sprintf(": `berth fsck --repair` would mend %s%d", least, all.mendable)
	}
	return summary + "; " + looked
}
