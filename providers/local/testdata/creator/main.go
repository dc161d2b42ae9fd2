// Creator is a broker as far as a provider can tell: it does one thing to one machine and may be
// killed while it does.
package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/local"
)

func main() {
	verb, dir, listen, guest, id, isolation := os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5], os.Args[6]
	p, err := local.New(local.Options{
		Dir:       dir,
		BrokerID:  "broker",
		GuestPath: func(string) (string, error) { return guest, nil },
		Isolation: local.IsolationMode(isolation),
	})
	check(err)
	ctx := context.Background()
	generation := uint64(1)
	if said := os.Getenv("GENERATION"); said != "" {
		generation, err = strconv.ParseUint(said, 10, 64)
		check(err)
	}
	switch verb {
	case "create":
		_, err = p.Create(ctx, providers.MachineSpec{
			MachineID: id, BrokerID: "broker", Generation: generation, ListenDir: listen,
			Token: []byte(strings.Repeat("t", 32)),
		})
	case "destroy":
		err = p.Destroy(ctx, providers.Machine{ID: id, ListenDir: listen})
	case "info":
		info, infoErr := p.Info(ctx)
		err = infoErr
		fmt.Printf("%d %s\n", info.Isolation, info.Message)
	}
	check(err)
	fmt.Println("done")
	if verb == "create" && os.Getenv("ONCE") == "" {
		select {} // a broker lives on, until it is killed
	}
}

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}
