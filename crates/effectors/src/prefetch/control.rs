//! The switch of the hardware prefetcher on each kind of processor, and access to it on one CPU.
//!
//! | processor | register | bits that are set | source |
//! |---|---|---|---|
//! | Intel Core and Xeon from Nehalem | MSR 0x1A4, one per core | 0-3: L2 stream, L2 adjacent line, L1 next line, L1 by instruction | Intel SDM volume 4, MSR_MISC_FEATURE_CONTROL / MSR_PREFETCH_CONTROL; Intel, *Disclosure of Hardware Prefetcher Control on Some Intel Processors* |
//! | Intel Atom of the Goldmont line | MSR 0x1A4, one per core | 0 and 2: L2 stream, L1 | Intel SDM volume 4; Linux arch/x86/kernel/cpu/resctrl (`prefetch_disable_bits`) |
//! | AMD from family 19h | MSR 0xC0000108, one per core | 0-3 and 5: L1 stream, stride, region; L2 stream, up/down | AMD PPR for family 19h, Core::X86::Msr::PrefetchControl; there when CPUID 8000_0021 EAX bit 13 is set |
//! | IBM POWER7 and later | DSCR, per hardware thread, `/sys/devices/system/cpu/cpuN/dscr` | field 0-2 (depth) = 1, no prefetch | Power ISA, DSCR; Linux Documentation/arch/powerpc/dscr.rst |
//!
//! Other switches stay: the adaptive prefetcher of newer Intel cores (bit 5) is not documented for all of them, and
//! efficiency cores have other registers.
//!
//! An MSR write by anybody taints the kernel until the next boot (flag S, "out of specification"). No undo removes this
//! one trace, so a person must have allowed it with `msr.allow_writes=on`.

use homeostat_kernel::bytes::{chosen, hexadecimal, list};
use homeostat_kernel::{Root, files};
use homeostat_sensors::processor::{Maker, Processor};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};

/// The register that holds the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// A model-specific register, through `/dev/cpu/N/msr`. SMT siblings share it.
    Msr(u32),
    /// The data stream control register, through sysfs. Each hardware thread has its own.
    Dscr,
}

impl std::fmt::Display for Register {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Msr(number) => write!(f, "msr {number:#x}"),
            Self::Dscr => f.write_str("dscr"),
        }
    }
}

impl Register {
    /// The reverse of its display. `None` for a register that this version does not write.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Msr(INTEL_MSR), Self::Msr(AMD_MSR), Self::Dscr]
            .into_iter()
            .find(|r| r.to_string() == text)
    }
}

/// The switch of one kind of processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control {
    /// Its register.
    pub register: Register,
    /// The bits about prefetch. All zero: on, as the processor starts.
    pub field: u64,
    /// These bits when prefetch is off.
    pub off: u64,
    /// The processors, for people.
    pub name: &'static str,
}

/// Meaning of a register value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// All prefetchers on, as the processor starts.
    On,
    /// All off.
    Off,
    /// Something between: somebody chose.
    Chosen,
}

const INTEL_MSR: u32 = 0x1A4;
const AMD_MSR: u32 = 0xC000_0108;
/// CPUID leaf 8000_0021, bit of EAX for the presence of the register (AMD APM volume 3).
const AMD_LEAF: u64 = 0x8000_0021;
const AMD_LEAF_BIT: u32 = 1 << 13;

/// Models of family 6 whose register has the four bits: Nehalem to Emerald and Granite Rapids. Numbers as in Linux
/// arch/x86/include/asm/intel-family.h.
const INTEL_FOUR: &[u32] = &[
    0x1A, 0x1E, 0x1F, 0x2E, // Nehalem
    0x25, 0x2C, 0x2F, // Westmere
    0x2A, 0x2D, 0x3A, 0x3E, // Sandy Bridge, Ivy Bridge
    0x3C, 0x3F, 0x45, 0x46, // Haswell
    0x3D, 0x47, 0x4F, 0x56, // Broadwell
    0x4E, 0x5E, 0x55, 0x8E, 0x9E, 0xA5, 0xA6, // Skylake, Cascade Lake, Kaby, Coffee, Comet Lake
    0x66, 0x7D, 0x7E, 0x6A, 0x6C, 0x8C, 0x8D, 0xA7, // Cannon, Ice, Tiger, Rocket Lake
    0x97, 0x9A, 0xB7, 0xBA, 0xBF, // Alder Lake, Raptor Lake: performance cores
    0x8F, 0xCF, 0xAD, 0xAE, // Sapphire, Emerald, Granite Rapids
];
/// Goldmont, Denverton, Goldmont Plus.
const INTEL_TWO: &[u32] = &[0x5C, 0x5F, 0x7A];

impl Control {
    /// The switch of this processor, by its family and model.
    pub fn of(processor: &Processor) -> Option<Self> {
        let control = |register, field, off, name| Self {
            register,
            field,
            off,
            name,
        };
        match (processor.maker, processor.family) {
            (Maker::Intel, 6) if INTEL_FOUR.contains(&processor.model) => Some(control(
                Register::Msr(INTEL_MSR),
                0b1111,
                0b1111,
                "Intel Core or Xeon",
            )),
            (Maker::Intel, 6) if INTEL_TWO.contains(&processor.model) => {
                Some(control(Register::Msr(INTEL_MSR), 0b101, 0b101, "Intel Goldmont"))
            }
            (Maker::Amd, 0x19..) => Some(control(
                Register::Msr(AMD_MSR),
                0b10_1111,
                0b10_1111,
                "AMD family 19h or later",
            )),
            (Maker::Power, 7..) => Some(control(Register::Dscr, 0b111, 1, "IBM POWER")),
            _ => None,
        }
    }

    /// The meaning of a register value.
    pub fn state(&self, value: u64) -> State {
        match value & self.field {
            0 => State::On,
            bits if bits == self.off => State::Off,
            _ => State::Chosen,
        }
    }

    /// The value with the prefetchers off and everything else as it is.
    pub fn switched_off(&self, value: u64) -> u64 {
        (value & !self.field) | self.off
    }
}

/// Why a register could not be read or written, by consequence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// The CPU is not online (or went away just now).
    #[error("the CPU is not online")]
    Offline,
    /// The driver is missing.
    #[error("{0} is absent")]
    Absent(String),
    /// A privilege is missing, the kernel is locked down, or writes are switched off.
    #[error("not permitted ({0})")]
    Denied(Errno),
    /// The processor refuses: it has no such register, or a hypervisor keeps it.
    #[error("the processor or its hypervisor refuses the register ({0})")]
    Refused(Errno),
    /// The answer is no value.
    #[error("{0}")]
    Malformed(String),
    /// Anything else: possible later, as far as is known.
    #[error("{0}")]
    Other(Errno),
}

/// CPUs that the kernel knows, and CPUs that run.
#[derive(Clone, Debug, Default)]
pub struct CpuLists {
    /// In the machine, running or not. `None` when the list cannot be read.
    pub present: Option<BTreeSet<u32>>,
    /// Running. `None` when the list cannot be read.
    pub online: Option<BTreeSet<u32>>,
}

impl CpuLists {
    /// Reads both lists.
    pub fn read(root: &Root) -> Self {
        let read = |leaf: &str| {
            files::text(root, &format!("/sys/devices/system/cpu/{leaf}"))
                .and_then(|t| list(t.as_bytes()))
                .filter(|l| !l.is_empty())
                .map(|l| l.into_iter().collect())
        };
        Self {
            present: read("present"),
            online: read("online"),
        }
    }
    /// Whether it runs, as far as the list tells.
    pub fn is_online(&self, cpu: u32) -> bool {
        self.online.as_ref().is_none_or(|l| l.contains(&cpu))
    }
    /// Whether it is in the machine, as far as the list tells.
    pub fn is_present(&self, cpu: u32) -> bool {
        self.present.as_ref().is_none_or(|l| l.contains(&cpu)) || self.is_online(cpu)
    }
}

/// Efficiency cores of a hybrid Intel processor (event source `cpu_atom`): their prefetchers have other switches.
pub fn efficiency_cores(root: &Root) -> BTreeSet<u32> {
    files::text(root, "/sys/bus/event_source/devices/cpu_atom/cpus")
        .and_then(|t| list(t.as_bytes()))
        .unwrap_or_default()
        .into_iter()
        .collect()
}

/// Online CPUs that share a core with this one, itself included, ascending.
pub fn siblings(root: &Root, cpu: u32) -> Vec<u32> {
    let base = format!("/sys/devices/system/cpu/cpu{cpu}/topology");
    ["core_cpus_list", "thread_siblings_list"]
        .iter()
        .find_map(|leaf| files::text(root, &format!("{base}/{leaf}")).and_then(|t| list(t.as_bytes())))
        .filter(|l| l.contains(&cpu))
        .unwrap_or_else(|| vec![cpu])
}

fn msr_path(cpu: u32) -> String {
    format!("/dev/cpu/{cpu}/msr")
}

fn dscr_path(cpu: u32) -> String {
    format!("/sys/devices/system/cpu/cpu{cpu}/dscr")
}

/// Type of an error of `open`, `read` or `write` on an MSR device or a sysfs file.
fn classify(errno: Errno, path: &str) -> AccessError {
    match errno {
        // A missing device means an offline CPU or a missing driver. The caller decides by the list of online CPUs.
        Errno::NOENT | Errno::NODEV => AccessError::Absent(path.to_owned()),
        // drivers/…/msr.c: no such CPU, or offline.
        Errno::NXIO => AccessError::Offline,
        Errno::PERM | Errno::ACCESS | Errno::ROFS => AccessError::Denied(errno),
        // A general protection fault of RDMSR or WRMSR.
        Errno::IO => AccessError::Refused(errno),
        _ => AccessError::Other(errno),
    }
}

fn open(root: &Root, path: &str, flags: OFlags) -> Result<OwnedFd, AccessError> {
    rustix::fs::open(root.path(path), flags | OFlags::CLOEXEC, Mode::empty()).map_err(|e| classify(e, path))
}

/// Reads the register of one CPU.
pub fn read(root: &Root, register: Register, cpu: u32) -> Result<u64, AccessError> {
    match register {
        Register::Msr(number) => {
            let path = msr_path(cpu);
            let file = open(root, &path, OFlags::RDONLY)?;
            read_msr(&file, number, &path)
        }
        Register::Dscr => {
            let path = dscr_path(cpu);
            let file = open(root, &path, OFlags::RDONLY)?;
            let mut text = [0u8; 64];
            let n = rustix::io::retry_on_intr(|| rustix::io::pread(&file, &mut text[..], 0))
                .map_err(|e| classify(e, &path))?;
            let text = text.get(..n).unwrap_or_default();
            hexadecimal(text.trim_ascii()).ok_or_else(|| {
                AccessError::Malformed(format!(
                    "{path} is no hexadecimal number: {:?}",
                    String::from_utf8_lossy(text)
                ))
            })
        }
    }
}

fn read_msr(file: impl AsFd, number: u32, path: &str) -> Result<u64, AccessError> {
    let mut bytes = [0u8; 8];
    // One call: the driver delivers a register whole, and a further read would return the next register.
    let n = rustix::io::retry_on_intr(|| rustix::io::pread(&file, &mut bytes[..], u64::from(number)))
        .map_err(|e| classify(e, path))?;
    if n != bytes.len() {
        return Err(AccessError::Malformed(format!(
            "{path} gave {n} of 8 bytes of register {number:#x}"
        )));
    }
    Ok(u64::from_le_bytes(bytes))
}

/// Writes the register of one CPU. The caller reads it back.
pub fn write(root: &Root, register: Register, cpu: u32, value: u64) -> Result<(), AccessError> {
    let (path, offset, bytes) = match register {
        Register::Msr(number) => (msr_path(cpu), u64::from(number), value.to_le_bytes().to_vec()),
        Register::Dscr => (dscr_path(cpu), 0, format!("{value:x}\n").into_bytes()),
    };
    let file = open(root, &path, OFlags::WRONLY)?;
    let n = rustix::io::retry_on_intr(|| rustix::io::pwrite(&file, &bytes, offset))
        .map_err(|e| classify(e, &path))?;
    if n == bytes.len() {
        Ok(())
    } else {
        Err(AccessError::Malformed(format!(
            "{path} took {n} of {} bytes",
            bytes.len()
        )))
    }
}

/// Whether an AMD processor reports the register by CPUID. `None` when CPUID cannot be read.
fn amd_says(root: &Root, cpu: u32) -> Option<bool> {
    let file = open(root, &format!("/dev/cpu/{cpu}/cpuid"), OFlags::RDONLY).ok()?;
    let mut registers = [0u8; 16];
    let n = rustix::io::retry_on_intr(|| rustix::io::pread(&file, &mut registers[..], AMD_LEAF)).ok()?;
    let eax = registers.first_chunk::<4>().filter(|_| n == registers.len())?;
    Some(u32::from_le_bytes(*eax) & AMD_LEAF_BIT != 0)
}

/// An obstacle between a person and the switch, found without writing anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// Nothing can be done about it here.
    Impossible(String),
    /// A person can remove it: finding and remedy.
    Remediable(String, &'static str),
}

/// The switch of this machine, if there is no obstacle. Reads the register of one CPU; writes nothing.
pub fn probe(root: &Root) -> Result<(Control, String), Obstacle> {
    use Obstacle::{Impossible, Remediable};
    let Some(processor) = Processor::read(root) else {
        return Err(Impossible(
            "/proc/cpuinfo does not tell which processor this is".into(),
        ));
    };
    let Some(control) = Control::of(&processor) else {
        return Err(Impossible(format!(
            "no switch is documented for this processor ({:?}, family {:#x}, model {:#x})",
            processor.maker, processor.family, processor.model
        )));
    };
    if processor.virtualised && matches!(control.register, Register::Msr(_)) {
        return Err(Impossible(format!(
            "{}: the register ({}) belongs to the host of this virtual machine",
            control.name, control.register
        )));
    }
    let lists = CpuLists::read(root);
    let hybrid = efficiency_cores(root);
    let first = lists
        .online
        .as_ref()
        .and_then(|l| l.iter().find(|c| !hybrid.contains(c)).copied())
        .unwrap_or(0);
    if control.register == Register::Msr(AMD_MSR) && amd_says(root, first) == Some(false) {
        return Err(Impossible(
            "the processor says by CPUID (leaf 8000_0021) that it has no prefetch control register".into(),
        ));
    }
    let value = match read(root, control.register, first) {
        Ok(value) => value,
        Err(AccessError::Absent(path)) if matches!(control.register, Register::Msr(_)) => {
            return Err(Remediable(
                format!("{path} is absent"),
                "modprobe msr allow_writes=on, and restart the service; writing an MSR marks the kernel as tainted (S) until the next \
                 boot",
            ));
        }
        Err(e @ AccessError::Denied(_)) => {
            return Err(Remediable(
                format!("reading {} of CPU {first}: {e}", control.register),
                "restart the service if the module msr was loaded after it; or run homeostat as root with CAP_SYS_RAWIO, without lockdown",
            ));
        }
        Err(e) => {
            return Err(Impossible(format!(
                "reading {} of CPU {first}: {e}",
                control.register
            )));
        }
    };
    if matches!(control.register, Register::Msr(_)) {
        let lockdown = files::bytes(root, "/sys/kernel/security/lockdown", 4096);
        if let Some(mode) = lockdown.as_deref().and_then(chosen).filter(|m| *m != "none") {
            return Err(Remediable(
                format!("lockdown is {mode}: the kernel refuses to write MSRs"),
                "boot without Secure Boot lockdown",
            ));
        }
        // Missing before Linux 5.9: then every write is accepted, without a taint.
        match files::text(root, "/sys/module/msr/parameters/allow_writes").as_deref() {
            None | Some("on") => {}
            Some(mode) => {
                return Err(Remediable(
                    format!("msr.allow_writes is {mode}"),
                    "echo on > /sys/module/msr/parameters/allow_writes, if you accept that a write marks the kernel as \
                     tainted (S) until the next boot",
                ));
            }
        }
    }
    let state = match control.state(value) {
        State::On => "on",
        State::Off => "off",
        State::Chosen => "partly off",
    };
    Ok((
        control,
        format!(
            "{}: {} of CPU {first} is {value:#x}, prefetch is {state}; nothing was written",
            control.name, control.register
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processor(maker: Maker, family: u32, model: u32) -> Processor {
        Processor {
            maker,
            family,
            model,
            virtualised: false,
        }
    }

    #[test]
    fn only_documented_processors_have_a_switch() {
        let of = |maker, family, model| Control::of(&processor(maker, family, model));
        assert_eq!(of(Maker::Intel, 6, 0x55).unwrap().register, Register::Msr(0x1A4));
        assert_eq!(of(Maker::Intel, 6, 0x5C).unwrap().field, 0b101);
        assert_eq!(
            of(Maker::Amd, 0x19, 1).unwrap().register,
            Register::Msr(0xC000_0108)
        );
        assert_eq!(of(Maker::Amd, 0x1A, 2).unwrap().off, 0x2F);
        assert_eq!(of(Maker::Power, 9, 0).unwrap().register, Register::Dscr);
        for (maker, family, model) in [
            (Maker::Intel, 6, 0x0F),  // Core 2: another register, on a shared bus
            (Maker::Intel, 6, 0xAF),  // Sierra Forest: efficiency cores only
            (Maker::Intel, 15, 0x55), // Pentium 4
            (Maker::Amd, 0x17, 0x31), // Zen 2: undocumented bits only
            (Maker::Power, 6, 0),
            (Maker::Arm, 0, 0xd40),
            (Maker::Other, 0x18, 1),
        ] {
            assert_eq!(of(maker, family, model), None, "{maker:?} {family:#x} {model:#x}");
        }
    }

    #[test]
    fn a_value_says_on_off_or_that_somebody_chose_and_the_rest_of_it_stays() {
        let amd = Control::of(&processor(Maker::Amd, 0x1A, 2)).unwrap();
        // Zen 5 starts with the master enable and the profile of the hardware (bits 6 to 9).
        assert_eq!(amd.state(0x3C0), State::On);
        assert_eq!(amd.switched_off(0x3C0), 0x3EF);
        assert_eq!(amd.state(0x3EF), State::Off);
        assert_eq!(amd.state(0x3C8), State::Chosen);
        let power = Control::of(&processor(Maker::Power, 9, 0)).unwrap();
        assert_eq!(power.switched_off(0x10), 0x11);
        assert_eq!(power.state(0x7), State::Chosen);
        let intel = Control::of(&processor(Maker::Intel, 6, 0x6A)).unwrap();
        assert_eq!(intel.switched_off(0x20), 0x2F);
        assert_eq!(intel.state(0x2F), State::Off);
    }

    #[test]
    fn registers_read_back_from_their_names() {
        for register in [Register::Msr(0x1A4), Register::Msr(0xC000_0108), Register::Dscr] {
            assert_eq!(Register::parse(&register.to_string()), Some(register));
        }
        // A record must not make us write any other register.
        assert_eq!(Register::parse("msr 0x10"), None);
        assert_eq!(Register::parse(""), None);
    }

    #[test]
    fn errors_say_what_follows() {
        let of = |e| classify(e, "/dev/cpu/0/msr");
        assert_eq!(of(Errno::NXIO), AccessError::Offline);
        assert_eq!(of(Errno::NOENT), AccessError::Absent("/dev/cpu/0/msr".into()));
        assert_eq!(of(Errno::PERM), AccessError::Denied(Errno::PERM));
        assert_eq!(of(Errno::IO), AccessError::Refused(Errno::IO));
        assert_eq!(of(Errno::MFILE), AccessError::Other(Errno::MFILE));
    }
}
