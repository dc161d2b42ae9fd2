// Command creator is as much of a broker as a crash test needs: it makes or destroys one machine.
//
//	creator create|destroy BROKER GUEST MACHINE LISTENDIR IMAGE GENERATION
package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"

	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/docker"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "creator:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	if len(arguments) != 7 {
		return fmt.Errorf("want 7 arguments, have %d", len(arguments))
	}
	order, broker, guest, machine, listenDir, image := arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]
	p, err := docker.New(docker.Options{BrokerID: broker, GuestPath: func(string) (string, error) { return guest, nil }})
	if err != nil {
		return err
	}
	defer func() { _ = p.Close() }()
	if order == "destroy" {
		return p.Destroy(context.Background(), providers.Machine{ID: machine, ListenDir: listenDir})
	}
	generation, err := strconv.ParseUint(arguments[6], 10, 64)
	if err != nil {
		return err
	}
	_, err = p.Create(context.Background(), providers.MachineSpec{
		MachineID: machine, BrokerID: broker, Generation: generation, Token: bytes.Repeat([]byte("t"), 32), Image: image, ListenDir: listenDir,
	})
	return err
}
