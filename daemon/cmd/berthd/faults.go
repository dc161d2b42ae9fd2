//go:build faults

package main

import (
	"path/filepath"

	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/fake"
)

// A build for tests has the provider whose machines isolate nothing and whose calls fail on purpose.
func init() {
	known = append(known, provider{fakeProvider, func(m machinery) (providers.Provider, error) {
		return fake.New(fake.Options{
			Dir: filepath.Join(m.state, fakeProvider), BrokerID: m.brokerID, GuestPath: m.guest, Log: m.log,
		})
	}})
}
