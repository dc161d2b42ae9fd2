// Package client is the Go client of a Berth broker: it dials berthd, makes mutating calls
// repeatable, repeats what may be repeated while the broker restarts, stays attached to commands over
// broken connections, waits for jobs and reads their output to the last byte. It holds no state but its
// connection, never starts a broker, never makes up an answer, and imports nothing of the broker's.
package client

import (
	"context"
	"io"

	"google.golang.org/grpc"

	"github.com/berth-sandbox/berth/client/attachment"
	"github.com/berth-sandbox/berth/client/connection"
	"github.com/berth-sandbox/berth/client/follow"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Client talks to one broker. It is safe for concurrent use; Close it at the end.
type Client struct{ conn *connection.Conn }

// Dial returns a client for the broker at an address: unix:///path, tcp://host:port, or empty for
// DefaultAddress. It only checks the address, whose error is an *AddressError; connecting is left to the
// first call. Without WithTransportCredentials a TCP host must be loopback.
func Dial(address string, opts ...Option) (*Client, error) {
	conn, err := connection.Dial(address, opts...)
	if err != nil {
		return nil, err
	}
	return &Client{conn: conn}, nil
}

// Close ends the connection and the calls in flight.
func (c *Client) Close() error { return c.conn.Close() }

// Address returns the broker's address as it was given or found.
func (c *Client) Address() string { return c.conn.Address() }

// Conn returns the connection beneath the clients below, for services that they do not cover, such
// as health and reflection. Its unary calls are repeated as the others are.
func (c *Client) Conn() grpc.ClientConnInterface { return c.conn.GRPC() }

// Sandboxes returns the client of SandboxService. As with all the clients below, mutating unary calls
// get a request_id when they have none (RunCommand excepted, whose meaning it would change), and
// repeatable ones are repeated while the broker is away.
func (c *Client) Sandboxes() berthv1.SandboxServiceClient {
	return berthv1.NewSandboxServiceClient(c.conn.GRPC())
}

// Jobs returns the client of JobService.
func (c *Client) Jobs() berthv1.JobServiceClient { return c.conn.Jobs() }

// Files returns the client of FileService.
func (c *Client) Files() berthv1.FileServiceClient {
	return berthv1.NewFileServiceClient(c.conn.GRPC())
}

// Checkpoints returns the client of CheckpointService.
func (c *Client) Checkpoints() berthv1.CheckpointServiceClient {
	return berthv1.NewCheckpointServiceClient(c.conn.GRPC())
}

// Leases returns the client of LeaseService.
func (c *Client) Leases() berthv1.LeaseServiceClient {
	return berthv1.NewLeaseServiceClient(c.conn.GRPC())
}

// Pools returns the client of PoolService.
func (c *Client) Pools() berthv1.PoolServiceClient {
	return berthv1.NewPoolServiceClient(c.conn.GRPC())
}

// Providers returns the client of ProviderService.
func (c *Client) Providers() berthv1.ProviderServiceClient {
	return berthv1.NewProviderServiceClient(c.conn.GRPC())
}

// Admin returns the client of AdminService.
func (c *Client) Admin() berthv1.AdminServiceClient {
	return berthv1.NewAdminServiceClient(c.conn.GRPC())
}

// WaitJob waits until a job is DONE and returns it with its outcome; LOST is an outcome, not an
// error. It outlasts restarts of the broker, and continues for as long as ctx allows while the broker
// answers. Errors: JOB_NOT_FOUND; *UnreachableError when the broker stays away for longer than the
// retry timeout; *UnknownOutcomeError; ctx's end.
func (c *Client) WaitJob(ctx context.Context, jobID string) (*berthv1.Job, error) {
	return follow.Wait(ctx, c.conn, jobID)
}

// Exec runs an attached command in a sandbox and returns its job, DONE, after the last byte of its
// output was written. It comes back by itself to a command whose connection broke, for as long as
// WaitJob would go on: no byte of either direction is lost or repeated. Where the spec says nothing of
// stdin, io.Stdin opens it.
//
// Beside an error it returns the job as it was last reported, nil when none was. Errors: as RunCommand;
// what a writer or Stdin returned; *UnknownStartError; *UnreachableError; *UnknownOutcomeError; ctx's
// end, after which the broker kills the command as its on_disconnect and disconnect_grace say.
func (c *Client) Exec(ctx context.Context, sandboxID string, spec *berthv1.JobSpec, streams ExecIO) (*berthv1.Job, error) {
	return attachment.Exec(ctx, c.conn, sandboxID, spec, streams)
}

// Attach is Exec for a job that was started before: it sends output from the given offsets on, and
// what Stdin holds goes behind what the job has taken so far. Without Stdin and Resize it only reads: who
// has the job's input and terminal keeps them. RequestID, IfGeneration and Lease are not used. Errors:
// JOB_NOT_FOUND, and as Exec.
func (c *Client) Attach(ctx context.Context, jobID string, stdoutOffset, stderrOffset uint64, streams ExecIO) (*berthv1.Job, error) {
	return attachment.Attach(ctx, c.conn, jobID, stdoutOffset, stderrOffset, streams)
}

// SignalJob sends a signal, by its number in the job's machine, to a job's process group, and returns
// the job as it was then. Its request_id is made here: to repeat a signal over a restart of the caller, give
// Jobs().SignalJob one. Errors: JOB_NOT_FOUND, WRONG_STATE for a job that is over, *UnreachableError.
func (c *Client) SignalJob(ctx context.Context, jobID string, signal int) (*berthv1.Job, error) {
	return attachment.Signal(ctx, c.conn, jobID, signal)
}

// Feed writes what r holds to a job's standard input from an offset on, and closes that at r's end if
// thenClose. It returns the offset behind the last byte that the job's machine has taken, also beside an
// error: the same bytes may be fed again from the same offset, what was taken is not taken twice. It
// outlasts restarts of the broker, and waits for a job that does not read. Errors: JOB_NOT_FOUND,
// WRONG_STATE, r's own, *UnreachableError, ctx's end.
func (c *Client) Feed(ctx context.Context, jobID string, offset uint64, r io.Reader, thenClose bool) (uint64, error) {
	return attachment.Feed(ctx, c.conn, jobID, offset, r, thenClose)
}

// AppendInput writes what r holds to a job's standard input, behind all that was written before, and closes that
// at r's end if thenClose. Each piece that r gives, up to 1 MiB, is written as a whole and once, whoever else
// appends. It outlasts restarts of the broker, and waits for a job that does not read. Errors: as Feed.
func (c *Client) AppendInput(ctx context.Context, jobID string, r io.Reader, thenClose bool) error {
	return attachment.Append(ctx, c.conn, jobID, r, thenClose)
}

// InputOffset returns how far a job's standard input was taken: where Feed continues. Errors:
// JOB_NOT_FOUND, WRONG_STATE for a job that is over, *UnreachableError, ctx's end.
func (c *Client) InputOffset(ctx context.Context, jobID string) (uint64, error) {
	return attachment.InputOffset(ctx, c.conn, jobID)
}
