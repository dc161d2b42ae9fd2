// Command hostile is what a machine's root may run to speak for its guest, or to hear what it says. Each
// attack prints what became of it.
package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"
)

const (
	hostSocket  = "/.berth/host/guest.sock"
	guestSocket = "/.berth/run/guest.sock"
)

func main() {
	attack, arguments := os.Args[1], os.Args[2:]
	switch attack {
	case "dial-the-broker":
		dialTheBroker(arguments[0])
	case "crowd":
		crowd()
	case "pose-as-the-guest":
		poseAsTheGuest()
	case "attach":
		fmt.Println(syscall.PtraceAttach(1))
	case "open":
		_, err := os.Open(arguments[0])
		fmt.Println(errors.Is(err, os.ErrPermission))
	}
}

// dialTheBroker opens many connections and says of how many the broker let one byte, or a second, pass.
func dialTheBroker(times string) {
	n, _ := strconv.Atoi(times)
	heard := 0
	for range n {
		conn, err := net.Dial("unix", hostSocket)
		if err != nil {
			continue // its queue is full of us
		}
		_ = conn.SetReadDeadline(time.Now().Add(time.Second))
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
			heard++
		}
		_ = conn.Close()
	}
	fmt.Println(heard)
}

// crowd keeps connections to the broker open, for as long as it is let.
func crowd() {
	fmt.Println("crowding")
	for {
		if conn, err := net.Dial("unix", hostSocket); err == nil {
			time.AfterFunc(10*time.Second, func() { _ = conn.Close() })
		}
		time.Sleep(time.Millisecond)
	}
}

// poseAsTheGuest listens where the guest does, and says when somebody speaks to it.
func poseAsTheGuest() {
	_ = os.Remove(guestSocket)
	listener, err := net.Listen("unix", guestSocket)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("listening")
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		if n, _ := conn.Read(make([]byte, 1)); n > 0 {
			fmt.Println("heard the broker")
		}
	}
}
