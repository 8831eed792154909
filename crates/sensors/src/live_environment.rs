//! The environment that a program uses, if the one in `/proc/PID/environ` is overwritten.
//!
//! A program that writes its title over its environment first copies that, and `environ` of its C library points to the
//! copy. redis, sshd, nginx's master, PostgreSQL and all users of `setproctitle` do so. `environ` is found as by the
//! dynamic linker: in the symbols of the program, then of its library. All data here is the process's claim about
//! itself. Every length is bounded, and only the two variables of homeostat are kept.

use crate::choice;
use crate::choice::Said;
use crate::regions::parse_range;
use homeostat_kernel::bytes::{lines, words};
use homeostat_kernel::other_memory;
use homeostat_kernel::other_memory::PLACES_MAX;

const VARIABLES_MAX: usize = 16 * 1024;
/// Bytes read of each variable: enough to recognise ours.
const BEGINNING: usize = 24;
const VALUE_MAX: usize = 4096;
/// Most entries searched in the tables of an ELF image.
const SEGMENTS_MAX: u64 = 64;
const DYNAMIC_MAX: u64 = 512;
const CHAIN_MAX: u32 = 512;

trait Memory {
    /// Fills `into` from that address; `None` if not all of it can be read.
    fn fill(&self, address: u64, into: &mut [u8]) -> Option<()>;

    fn u64_at(&self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.fill(address, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }

    fn u32_at(&self, address: u64) -> Option<u32> {
        let mut bytes = [0; 4];
        self.fill(address, &mut bytes)?;
        Some(u32::from_le_bytes(bytes))
    }
}

struct OfProcess(i32);

impl Memory for OfProcess {
    fn fill(&self, address: u64, into: &mut [u8]) -> Option<()> {
        let length = into.len();
        let n = other_memory::read(self.0, &[address], length, into).ok()?;
        (n == length).then_some(())
    }
}

/// Reads the environment that a process uses; `None` if it is not found or incomplete. `maps` is the whole text of its
/// `/proc/PID/maps`. It may wait for pages of the process: run it with a time limit.
pub(super) fn read(pid: i32, maps: &[u8], executable: &str, place: &str) -> Option<Said> {
    let memory = OfProcess(pid);
    let environ = modules(maps, executable)
        .into_iter()
        .find_map(|base| environ_of(&memory, base))?;
    read_variables(&memory, environ, place)
}

/// Base addresses of the program and its C library, in the order of symbol lookup.
fn modules(maps: &[u8], executable: &str) -> Vec<u64> {
    let mut program = Vec::new();
    let mut libraries = Vec::new();
    for line in lines(maps) {
        let mut parts = words(line);
        let (Some(range), Some(_), Some(offset), Some(_), Some(_), Some(name)) = (
            parts.next().and_then(parse_range),
            parts.next(),
            parts.next(),
            parts.next(),
            parts.next(),
            parts.next(),
        ) else {
            continue;
        };
        if offset.iter().any(|b| *b != b'0') {
            continue;
        }
        let leaf = name.rsplit(|b| *b == b'/').next().unwrap_or_default();
        if name == executable.as_bytes() {
            program.push(range.0);
        } else if leaf.starts_with(b"libc.") || leaf.starts_with(b"libc-") || leaf.starts_with(b"ld-musl") {
            libraries.push(range.0);
        }
    }
    program.truncate(1);
    libraries.truncate(3);
    program.extend(libraries);
    program
}

/// Address of the variable `environ` that the ELF image at `base` defines.
fn environ_of(memory: &impl Memory, base: u64) -> Option<u64> {
    const PT_LOAD: u32 = 1;
    const PT_DYNAMIC: u32 = 2;
    let mut header = [0; 64];
    memory.fill(base, &mut header)?;
    // 64 bits, little-endian.
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let half = |at: usize| {
        Some(u64::from(u16::from_le_bytes([
            *header.get(at)?,
            *header.get(at + 1)?,
        ])))
    };
    let segments = memory_offset(&header, 32)?;
    let (size, count) = (half(54)?, half(56)?.min(SEGMENTS_MAX));
    let (mut bias, mut dynamic) = (None, None);
    for n in 0..count {
        let at = base.checked_add(segments)?.checked_add(n * size)?;
        let kind = memory.u32_at(at)?;
        let (offset, address) = (memory.u64_at(at + 8)?, memory.u64_at(at + 16)?);
        match kind {
            PT_LOAD if offset == 0 => bias = Some(base.wrapping_sub(address)),
            PT_DYNAMIC => dynamic = Some(address),
            _ => {}
        }
    }
    let (bias, dynamic) = (bias?, dynamic?);
    let dynamic = bias.wrapping_add(dynamic);
    let (mut symbols, mut names, mut gnu, mut sysv) = (None, None, None, None);
    for n in 0..DYNAMIC_MAX {
        let at = dynamic.checked_add(n * 16)?;
        let (tag, value) = (memory.u64_at(at)?, memory.u64_at(at.checked_add(8)?)?);
        // glibc stores addresses, musl keeps the file's values.
        let address = Some(if value < base {
            bias.wrapping_add(value)
        } else {
            value
        });
        match tag {
            0 => break,
            4 => sysv = address,
            5 => names = address,
            6 => symbols = address,
            0x6fff_fef5 => gnu = address,
            _ => {}
        }
    }
    let table = Symbols {
        memory,
        symbols: symbols?,
        names: names?,
    };
    [&b"environ"[..], b"__environ"].into_iter().find_map(|name| {
        let value = match gnu {
            Some(gnu) => table.by_gnu_hash(gnu, name),
            None => table.by_sysv_hash(sysv?, name),
        };
        Some(bias.wrapping_add(value?))
    })
}

fn memory_offset(header: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(header.get(at..at + 8)?.try_into().ok()?))
}

struct Symbols<'m, M> {
    memory: &'m M,
    symbols: u64,
    names: u64,
}

impl<M: Memory> Symbols<'_, M> {
    /// Value of the symbol with this number, if it has that name and is defined.
    fn value(&self, number: u32, name: &[u8]) -> Option<u64> {
        let at = self.symbols.checked_add(u64::from(number) * 24)?;
        let own = self.names.checked_add(u64::from(self.memory.u32_at(at)?))?;
        let mut text = [0; 10];
        let text = text.get_mut(..=name.len())?;
        self.memory.fill(own, text)?;
        let section = self.memory.u32_at(at + 4)? >> 16;
        let matches = text.strip_suffix(&[0]) == Some(name);
        let value = self.memory.u64_at(at + 8)?;
        (matches && section != 0 && value != 0).then_some(value)
    }

    fn by_gnu_hash(&self, table: u64, name: &[u8]) -> Option<u64> {
        let hash = name
            .iter()
            .fold(5381_u32, |h, b| h.wrapping_mul(33).wrapping_add(u32::from(*b)));
        let word = |n: u64| self.memory.u32_at(table.checked_add(n * 4)?);
        let (buckets, first, bloom) = (word(0)?, word(1)?, word(2)?);
        let buckets_at = 4 + u64::from(bloom) * 2;
        let bucket = word(buckets_at + u64::from(hash.checked_rem(buckets)?))?;
        for n in 0..CHAIN_MAX {
            let number = bucket.checked_add(n)?;
            let entry = word(buckets_at + u64::from(buckets) + u64::from(number.checked_sub(first)?))?;
            if entry | 1 == hash | 1 {
                if let Some(value) = self.value(number, name) {
                    return Some(value);
                }
            }
            if entry & 1 == 1 {
                break;
            }
        }
        None
    }

    fn by_sysv_hash(&self, table: u64, name: &[u8]) -> Option<u64> {
        let hash = name.iter().fold(0_u32, |h, b| {
            let h = (h << 4).wrapping_add(u32::from(*b));
            let high = h & 0xf000_0000;
            (h ^ (high >> 24)) & !high
        });
        let word = |n: u64| self.memory.u32_at(table.checked_add(n * 4)?);
        let buckets = word(0)?;
        let mut number = word(2 + u64::from(hash.checked_rem(buckets)?))?;
        for _ in 0..CHAIN_MAX {
            if number == 0 {
                break;
            }
            if let Some(value) = self.value(number, name) {
                return Some(value);
            }
            number = word(2 + u64::from(buckets) + u64::from(number))?;
        }
        None
    }
}

/// Reads the variables behind the pointer at `environ`; `None` unless each is readable and has a name.
fn read_variables(memory: &OfProcess, environ: u64, place: &str) -> Option<Said> {
    let list = memory.u64_at(environ)?;
    let mut variables = Vec::new();
    loop {
        let variable = memory.u64_at(list.checked_add(variables.len() as u64 * 8)?)?;
        if variable == 0 {
            break;
        }
        if variables.len() >= VARIABLES_MAX {
            return None;
        }
        variables.push(variable);
    }
    if variables.is_empty() {
        return None;
    }
    let mut said = Said::default();
    let mut bytes = vec![0; PLACES_MAX * BEGINNING];
    let mut left = variables.as_slice();
    let mut is_whole = true;
    while !left.is_empty() {
        let some = left.get(..left.len().min(PLACES_MAX))?;
        let read = other_memory::read(memory.0, some, BEGINNING, &mut bytes).unwrap_or(0);
        let mut taken = 0;
        for (variable, beginning) in some.iter().zip(bytes.chunks(BEGINNING)).take(read / BEGINNING) {
            is_whole &= take(memory, *variable, beginning, &mut said, place);
            taken += 1;
        }
        if taken < some.len() {
            // It lies at the end of a mapping.
            let variable = *some.get(taken)?;
            let mut end = [0; BEGINNING];
            let length = (0x1000 - (variable % 0x1000)).min(BEGINNING as u64) as usize;
            memory.fill(variable, end.get_mut(..length)?)?;
            is_whole &= take(memory, variable, &end, &mut said, place);
            taken += 1;
        }
        left = left.get(taken..)?;
    }
    bytes.fill(0);
    (is_whole || said.choice.never.is_some()).then_some(said)
}

/// Applies one variable with this beginning. Returns whether it looks like a variable.
fn take(memory: &OfProcess, at: u64, beginning: &[u8], said: &mut Said, place: &str) -> bool {
    let text = beginning.split(|b| *b == 0).next().unwrap_or_default();
    if text.is_empty() || text.starts_with(b"=") || (text.len() < BEGINNING && !text.contains(&b'=')) {
        return false;
    }
    if !(text.starts_with(b"HOMEOSTAT=") || text.starts_with(b"HOMEOSTAT_STRATEGIES=")) {
        return true;
    }
    let mut whole = Vec::new();
    while whole.len() < VALUE_MAX {
        let here = at.saturating_add(whole.len() as u64);
        // Within the page: the next may be absent.
        let mut piece = vec![0; (0x1000 - (here % 0x1000)).min(256) as usize];
        if memory.fill(here, &mut piece).is_none() {
            return false;
        }
        match piece.iter().position(|b| *b == 0) {
            Some(end) => {
                whole.extend_from_slice(piece.get(..end).unwrap_or_default());
                choice::take_variable(&mut said.choice, &whole, place);
                return true;
            }
            None => whole.extend_from_slice(&piece),
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Bytes(Vec<u8>);

    impl Memory for Bytes {
        fn fill(&self, address: u64, into: &mut [u8]) -> Option<()> {
            let from = usize::try_from(address).ok()?;
            into.copy_from_slice(self.0.get(from..from.checked_add(into.len())?)?);
            Some(())
        }
    }

    #[test]
    fn the_environment_that_this_test_uses_is_found() {
        let maps = std::fs::read("/proc/self/maps").unwrap();
        let executable = std::fs::read_link("/proc/self/exe").unwrap();
        let pid = std::process::id() as i32;
        let said = read(pid, &maps, executable.to_str().unwrap(), "p").unwrap();
        assert_eq!(said.choice.never.is_some(), std::env::var("HOMEOSTAT").is_ok());
    }

    proptest! {
        /// An image that lies about itself is refused within bounds.
        #[test]
        fn no_image_makes_it_panic_or_run_on(
            mut bytes in proptest::collection::vec(any::<u8>(), 64..2000),
            small in any::<bool>(),
        ) {
            bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
            if small {
                bytes[32..40].copy_from_slice(&64_u64.to_le_bytes());
                bytes[54..58].copy_from_slice(&[56, 0, 9, 0]);
            }
            let _ = environ_of(&Bytes(bytes), 0);
        }
    }
}
