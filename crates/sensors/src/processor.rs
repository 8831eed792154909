//! The processor model, for tables of model-specific registers and events.

use homeostat_kernel::bytes::{lines, number, words};
use homeostat_kernel::{Root, files};

/// Most bytes read of `/proc/cpuinfo`: the first CPU's entry suffices; with thousands of CPUs the file has megabytes.
const FIRST_ENTRY_MAX: usize = 8 * 1024;

/// Maker of the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// `GenuineIntel`.
    Intel,
    /// `AuthenticAMD`.
    Amd,
    /// IBM POWER, by the line `cpu : POWER…`.
    Power,
    /// An Arm core, by the line `CPU implementer`.
    Arm,
    /// Another maker.
    Other,
}

/// The first CPU in `/proc/cpuinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Processor {
    /// Maker of the processor.
    pub maker: Maker,
    /// `cpu family` on x86, the generation on POWER (9 for `POWER9`), else 0.
    pub family: u32,
    /// `model` on x86, `CPU part` on Arm, else 0.
    pub model: u32,
    /// The CPU reports a virtual machine (x86 only). A POWER partition always has a hypervisor, which lends registers.
    pub virtualised: bool,
}

impl Processor {
    /// Reads the first entry of `/proc/cpuinfo`; `None` if it is absent or unknown.
    pub fn read(root: &Root) -> Option<Self> {
        Self::parse(&files::bytes(root, "/proc/cpuinfo", FIRST_ENTRY_MAX)?)
    }

    /// Parses the text of `/proc/cpuinfo`.
    pub fn parse(cpuinfo: &[u8]) -> Option<Self> {
        let value = |key: &str| {
            lines(cpuinfo).find_map(|line| {
                let at = line.iter().position(|&b| b == b':')?;
                let (name, rest) = line.split_at(at);
                (name.trim_ascii() == key.as_bytes()).then(|| rest.get(1..).unwrap_or_default().trim_ascii())
            })
        };
        let decimal = |key: &str| value(key).and_then(number).and_then(|n| u32::try_from(n).ok());
        if let Some(vendor) = value("vendor_id") {
            return Some(Self {
                maker: match vendor {
                    b"GenuineIntel" => Maker::Intel,
                    b"AuthenticAMD" => Maker::Amd,
                    _ => Maker::Other,
                },
                family: decimal("cpu family")?,
                model: decimal("model")?,
                virtualised: value("flags").is_some_and(|f| words(f).any(|w| w == b"hypervisor")),
            });
        }
        if let Some(name) = value("cpu").and_then(|v| v.strip_prefix(b"POWER")) {
            let digits = name.iter().take_while(|b| b.is_ascii_digit()).count();
            return Some(Self {
                maker: Maker::Power,
                family: number(name.get(..digits)?).and_then(|n| u32::try_from(n).ok())?,
                model: 0,
                virtualised: false,
            });
        }
        let part = value("CPU part").and_then(|v| v.strip_prefix(b"0x"))?;
        value("CPU implementer")?;
        Some(Self {
            maker: Maker::Arm,
            family: 0,
            model: homeostat_kernel::bytes::hexadecimal(part).and_then(|n| u32::try_from(n).ok())?,
            virtualised: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_told_apart_by_their_first_entry() {
        let amd = b"processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\
                    flags\t\t: fpu vme hypervisor lahf_lm\n\nprocessor\t: 1\nvendor_id\t: GenuineIntel\n";
        assert_eq!(
            Processor::parse(amd),
            Some(Processor {
                maker: Maker::Amd,
                family: 25,
                model: 17,
                virtualised: true
            })
        );
        let intel = b"vendor_id : GenuineIntel\ncpu family : 6\nmodel : 85\nflags : fpu lahf_lm\n";
        let seen = Processor::parse(intel).unwrap();
        assert_eq!(
            (seen.maker, seen.model, seen.virtualised),
            (Maker::Intel, 85, false)
        );
        let power =
            b"processor\t: 0\ncpu\t\t: POWER9 (architected), altivec supported\nclock\t\t: 3000.000000MHz\n";
        let seen = Processor::parse(power).unwrap();
        assert_eq!((seen.maker, seen.family), (Maker::Power, 9));
        let arm = b"processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n";
        let seen = Processor::parse(arm).unwrap();
        assert_eq!((seen.maker, seen.model), (Maker::Arm, 0xd40));
        let hygon = b"vendor_id : HygonGenuine\ncpu family : 24\nmodel : 1\n";
        assert_eq!(Processor::parse(hygon).unwrap().maker, Maker::Other);
    }

    #[test]
    fn rubbish_is_no_processor() {
        for text in [
            &b""[..],
            b":\n::\n",
            b"vendor_id : GenuineIntel\n",
            b"cpu : POWER\n",
            b"CPU part : 0xzz\n",
        ] {
            assert_eq!(Processor::parse(text), None, "{text:?}");
        }
    }
}
