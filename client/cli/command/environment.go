package command

import (
	"unicode/utf8"

	"github.com/berth-sandbox/berth/client/cli/usage"
)

// Environment parses K=V flags where K alone takes its value from the environment.
func (p *Program) Environment(flag string, given []string) (map[string]string, error) {
	return usage.ParsePairs(flag, given, func(key string) (string, error) {
		value, found := p.LookupEnv(key)
		if !found {
			return "", usage.Errorf("--%s %s: it is not set in the environment; set it, or give %s=VALUE", flag, key, key)
		}
		if !utf8.ValidString(value) {
			return "", usage.Errorf("--%s %s: its value is not UTF-8, and only that can be sent", flag, key)
		}
		return value, nil
	})
}
