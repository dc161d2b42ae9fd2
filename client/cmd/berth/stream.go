package main

import (
	"io"
	"os"
	"syscall"
)

// stream is one of the standard streams. Where its descriptor was closed it fails as that would, instead of
// dropping what is written.
func stream(file *os.File, descriptor int) io.ReadWriter {
	if closedAtStart&(1<<descriptor) == 0 {
		return file
	}
	return closedStream(file.Name())
}

// closedStream is named after the stream that was closed.
type closedStream string

func (s closedStream) Read([]byte) (int, error) { return 0, s.fails("read") }

func (s closedStream) Write([]byte) (int, error) { return 0, s.fails("write") }

func (s closedStream) fails(op string) error {
	return &os.PathError{Op: op, Path: string(s), Err: syscall.EBADF}
}
