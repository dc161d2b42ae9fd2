# Everything that is done to this tree is done through this file. It needs Go, git and make; what a
# target needs beside those is said by the target when it is missing.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# A build says what VERSION says; the go command need not ask git a second time, which fails where the
# tree belongs to another user.
export GOFLAGS := $(GOFLAGS) -buildvcs=false

TOOLS := bin/tools
# What `berthd --version` and its siblings say. A tree without git is "unknown".
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS = -s -w -X main.version=$(VERSION)
# Where berth can see which of its standard streams are closed, it begins with that; client/cmd/berth/entry.go.
ENTRY = $(if $(wildcard client/cmd/berth/entry_$(shell go env GOOS)_$(shell go env GOARCH).s),-E main.entry)
PROGRAMS := ./daemon/cmd/berthd ./client/cmd/berth ./providers/guest/cmd/berth-guest

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.* ## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r target does; do \
		printf '  %-15s %s\n' "$$target" "$$does"; done

# ---- The programs ----------------------------------------------------------------------------------

# Without gRPC's own trace pages, which nothing here serves: a guest is 3 MB smaller.
BUILD_TAGS := grpcnotrace

.PHONY: build
build: ## build berthd, berth and berth-guest into bin/, static and stripped
	@mkdir -p bin
	CGO_ENABLED=0 go build -tags $(BUILD_TAGS) -trimpath -ldflags '$(LDFLAGS)' -ldflags './client/cmd/berth=$(LDFLAGS) $(ENTRY)' -o bin/ $(PROGRAMS)

.PHONY: demo
demo: build ## start a broker on this machine and show what it does
	go run ./examples/demo

# ---- Tests -----------------------------------------------------------------------------------------

# gotestsum prints what failed as it fails, at the end what was skipped and why, and the counts last.
GOTESTSUM := $(TOOLS)/gotestsum
gotestsum = $(GOTESTSUM) --format $(1) --format-icons text --jsonfile bin/tests-$$$$.json --post-run-command 'sh tools/verdict.sh' -- -vet=off
TEST = $(call gotestsum,pkgname-and-test-fails)
TEST_VERBOSE = $(call gotestsum,standard-verbose) -count=1

# How long one package may take.
TIMEOUT ?= 24m
.PHONY: test
test: $(GOTESTSUM) ## vet and test everything; what was skipped is listed at the end with its reason
	go vet ./...
	$(TEST) -timeout $(TIMEOUT) ./...

# What is left out of it, as an extended regular expression: the suites run built programs.
RACE_SKIP ?= /conformance/
.PHONY: race
race: $(GOTESTSUM) ## the packages' tests under the race detector (needs a C compiler; the suites run built programs)
	@command -v "$$(go env CC)" >/dev/null || { \
		echo "make race: the race detector needs a C compiler, and there is no $$(go env CC) here (install gcc)" >&2; exit 1; }
	CGO_ENABLED=1 $(TEST) -race -timeout 20m $$(go list ./... | grep -Ev '$(RACE_SKIP)')

.PHONY: crash
crash: $(GOTESTSUM) ## crash at every failpoint, restart, and check what must hold
	BERTH_RUN=crash $(TEST) -count=1 -timeout 40m ./conformance/crash ./conformance/failpoint

# JOBS short jobs are run in one test, and three times over in another.
JOBS ?= 1200
.PHONY: hostfaults
hostfaults: $(GOTESTSUM) ## what happens around a broker: full disk, stepped clock, freeze, reboot, upgrade, many jobs (JOBS=1200)
	BERTH_RUN=hostfaults BERTH_JOBS=$(JOBS) $(TEST) -count=1 -parallel 8 -timeout 4h ./conformance/hostfaults

# How often the broker is killed, on each of the providers. Seeds: BERTH_SEED. On 2 CPUs 20 kills take about
# half a minute a provider.
N ?= 20
PROVIDERS ?= fake local
.PHONY: robust
robust: $(GOTESTSUM) ## random traffic and faults while the broker is killed N times (default 20) on PROVIDERS (default fake local)
	@for provider in $(PROVIDERS); do echo "on $$provider:"; \
		BERTH_RUN=robust BERTH_PROVIDER=$$provider BERTH_KILLS=$(N) $(TEST_VERBOSE) -timeout 24h ./conformance/robust -run TestRandom || exit 1; done

.PHONY: mutation
mutation: $(GOTESTSUM) ## take out one guard after the other, and see that a test fails each time (minutes)
	$(TEST_VERBOSE) -tags mutation -timeout 4h ./conformance/mutation

.PHONY: byzantine
byzantine: $(GOTESTSUM) ## have guests lie to a broker in every way there is
	BERTH_RUN=byzantine $(TEST) -count=1 -timeout 40m ./conformance/byzantine

# The image is made anew for each run and removed after it.
IMAGE := berth-conformance:$(shell date +%s)
# What is run on docker: the API suite, by either way to reach a guest, a crash at every failpoint, and random
# kills, DOCKER_N of them.
ON_DOCKER ?= docker docker-bridge crash robust
# On this host `make test` has run the API suite with namespaces; this is without. Empty: not again.
ON_LOCAL ?= local-plain
DOCKER_N ?= 10
.PHONY: conformance
conformance: $(GOTESTSUM) ## the API suite on every other provider that is here, and on docker crashes and random kills (docker needs an engine and debootstrap)
	$(if $(ON_LOCAL),BERTH_PROVIDER=$(ON_LOCAL) $(TEST) -count=1 -timeout 40m ./conformance/api)
	@docker version >/dev/null 2>&1 || { echo "make conformance: no Docker Engine answers here, so docker was not tried"; exit 0; }; \
	command -v debootstrap >/dev/null || { echo "make conformance: debootstrap makes the image for docker, and is not here, so docker was not tried"; exit 0; }; \
	conformance/image.sh $(IMAGE) && status=0; \
	export BERTH_DOCKER_IMAGE=$(IMAGE); \
	for suite in $(ON_DOCKER); do \
		echo "on docker: $$suite"; \
		case $$suite in \
		docker*) BERTH_PROVIDER=$$suite $(TEST) -count=1 -timeout 40m ./conformance/api ;; \
		crash) BERTH_RUN=crash BERTH_PROVIDER=docker $(TEST) -count=1 -timeout 40m ./conformance/crash ;; \
		robust) $(MAKE) robust N=$(DOCKER_N) PROVIDERS=docker ;; \
		esac || status=1; \
	done; \
	docker image rm -f $(IMAGE) >/dev/null; exit $$status

# What is slow and rarely fails is run before an issue is resolved, at the commit that resolves it.
.PHONY: night
night: export BERTH_RUN = night
night: export TIMEOUT = 3h
night: ## what CI has no time for: tests of full size, every mutation, every lie, 300 random kills a provider, 20,000 jobs (hours)
	$(MAKE) test
	$(MAKE) race
	$(MAKE) mutation
	$(MAKE) byzantine
	$(MAKE) hostfaults JOBS=20000
	$(MAKE) robust N=300
	$(MAKE) conformance DOCKER_N=300

# Go fuzzes one target of one package at a time. A number of runs, not a time: when the time is up while
# an input is being tried or made smaller, which on a busy machine is likely, Go calls it a failure
# ("context deadline exceeded", https://go.dev/issue/75804).
FUZZTIME ?= 1500x
.PHONY: fuzz
fuzz: ## fuzz everything that parses what a peer sends, FUZZTIME runs of each (default 1500x)
	@grep -rl '^func Fuzz' --include='*_test.go' . | xargs -n 1 dirname | sort -u | while read -r package; do \
		sed -n 's/^func \(Fuzz[A-Za-z0-9]*\)(.*/\1/p' $$package/*_test.go | while read -r target; do \
			go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 100x $$package || exit 1; \
		done || exit 1; \
	done

.PHONY: bench
bench: build ## measure what it costs, beside what it stands on, or beside the programs of BASE=DIR; prints a table and writes bench.json
	go run ./conformance/cmd/bench $(if $(BASE),-base $(BASE))

# ---- The source ------------------------------------------------------------------------------------

.PHONY: lint
lint: $(TOOLS)/golangci-lint $(TOOLS)/buf ## golangci-lint with gofmt, and buf lint
	$(TOOLS)/golangci-lint run ./...
	$(TOOLS)/buf lint

.PHONY: generate
generate: $(TOOLS)/buf $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc ## write the *.pb.go files anew from proto/, and what follows from the table of arrows
	$(TOOLS)/buf generate
	go run ./conformance/cmd/arrows

GENERATED := proto .golangci.yml ARCHITECTURE.md
.PHONY: generate-check
generate-check: generate ## fail if that changes what git has
	@changes="$$(git status --porcelain -- $(GENERATED))"; test -z "$$changes" || { \
		git --no-pager diff -- $(GENERATED); \
		printf '%s\n' "$$changes"; echo "make generate-check: this differs from what is committed" >&2; exit 1; }

.PHONY: breaking
breaking: $(TOOLS)/buf ## fail if proto/ breaks those who were built against proto/baseline.binpb
	$(TOOLS)/buf breaking proto --against proto/baseline.binpb

.PHONY: baseline
baseline: $(TOOLS)/buf ## renew that baseline from proto/ as it stands (CONTRIBUTING.md says when)
	$(TOOLS)/buf build proto --exclude-source-info -o proto/baseline.binpb

.PHONY: clean
clean: ## remove what the other targets made
	rm -rf bin

# ---- Tools -----------------------------------------------------------------------------------------
# They live in a module of their own, so that the product's dependencies stay few. The one exception
# is protoc-gen-go: generated code and runtime must be of one version, the product's.

TOOL_PACKAGE_buf                := github.com/bufbuild/buf/cmd/buf
TOOL_PACKAGE_golangci-lint      := github.com/golangci/golangci-lint/v2/cmd/golangci-lint
TOOL_PACKAGE_protoc-gen-go-grpc := google.golang.org/grpc/cmd/protoc-gen-go-grpc
TOOL_PACKAGE_gotestsum          := gotest.tools/gotestsum
TOOL_PACKAGE_grpcurl            := github.com/fullstorydev/grpcurl/cmd/grpcurl

$(addprefix $(TOOLS)/,buf golangci-lint gotestsum protoc-gen-go-grpc grpcurl): tools/go.mod
	go build -C tools -o $(CURDIR)/$@ $(TOOL_PACKAGE_$(@F))
	@touch $@

$(TOOLS)/protoc-gen-go: go.mod
	go build -o $@ google.golang.org/protobuf/cmd/protoc-gen-go
	@touch $@
