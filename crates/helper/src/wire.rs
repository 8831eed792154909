//! Messages between the daemon and its helpers: a length, with descriptors, then JSON.

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

const MESSAGE_MAX: usize = 8 * 1024 * 1024;
const DESCRIPTORS_MAX: usize = 3;

/// One end of a line between two processes.
#[derive(Debug)]
pub struct Line(pub(crate) OwnedFd);

impl Line {
    /// Both ends of a new line.
    pub fn pair() -> Result<(Self, Self), Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        Ok((Self(one), Self(other)))
    }

    /// Sends a message, and descriptors with it; without a deadline the wait is unlimited.
    pub fn send<T: Serialize>(
        &self,
        message: &T,
        descriptors: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<(), Errno> {
        let mut bytes = vec![0; 4];
        serde_json::to_writer(&mut bytes, message).map_err(|_| Errno::PROTO)?;
        let length = bytes.len() - 4;
        if length > MESSAGE_MAX {
            return Err(Errno::MSGSIZE);
        }
        let length = u32::try_from(length).map_err(|_| Errno::MSGSIZE)?;
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
        let mut rest = bytes.as_slice();
        while !descriptors.is_empty() && rest.len() == bytes.len() {
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
                return Err(Errno::MSGSIZE);
            }
            let head = [IoSlice::new(&rest[..4])];
            match rustix::net::sendmsg(&self.0, &head, &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(n) => rest = &rest[n..],
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        while !rest.is_empty() {
            match rustix::net::send(&self.0, rest, SendFlags::NOSIGNAL) {
                Ok(n) => rest = &rest[n..],
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// The next message. Descriptors with it are refused: nothing of a workload gets into this process.
    pub fn receive<T: DeserializeOwned>(&self, deadline: Option<Instant>) -> Result<T, Errno> {
        let mut length = [0; 4];
        self.exactly(&mut length, deadline)?;
        self.body(length, deadline)
    }

    /// The next message, and its descriptors.
    pub fn receive_with<T: DeserializeOwned>(
        &self,
        deadline: Option<Instant>,
    ) -> Result<(T, Vec<OwnedFd>), Errno> {
        let mut length = [0; 4];
        let mut descriptors = Vec::new();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let (got, flags) = loop {
            let mut slices = [IoSliceMut::new(&mut length)];
            match rustix::net::recvmsg(&self.0, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Ok(message) => break (message.bytes, message.flags),
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, deadline)?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                descriptors.extend(came);
            }
        }
        if got == 0 {
            return Err(Errno::CONNRESET);
        }
        self.exactly(&mut length[got..], deadline)?;
        let body = self.body(length, deadline)?;
        // A descriptor was lost because this process has no room for more.
        if flags.contains(ReturnFlags::CTRUNC) {
            return Err(Errno::MFILE);
        }
        Ok((body, descriptors))
    }

    fn body<T: DeserializeOwned>(&self, length: [u8; 4], deadline: Option<Instant>) -> Result<T, Errno> {
        let length = usize::try_from(u32::from_ne_bytes(length)).map_err(|_| Errno::MSGSIZE)?;
        if length > MESSAGE_MAX {
            return Err(Errno::MSGSIZE);
        }
        let mut bytes = vec![0; length];
        self.exactly(&mut bytes, deadline)?;
        serde_json::from_slice(&bytes).map_err(|_| Errno::PROTO)
    }

    fn exactly(&self, mut bytes: &mut [u8], deadline: Option<Instant>) -> Result<(), Errno> {
        while !bytes.is_empty() {
            match rustix::net::recv(&self.0, &mut *bytes, RecvFlags::empty()) {
                Ok((0, _)) => return Err(Errno::CONNRESET),
                Ok((n, _)) => bytes = &mut bytes[n..],
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, deadline)?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn wait(&self, flags: PollFlags, deadline: Option<Instant>) -> Result<(), Errno> {
        wait(&self.0, flags, deadline)
    }
}

pub(crate) fn wait(fd: &OwnedFd, flags: PollFlags, deadline: Option<Instant>) -> Result<(), Errno> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        match rustix::event::poll(&mut [PollFd::new(fd, flags)], left.as_ref()) {
            Ok(0) => return Err(Errno::TIMEDOUT),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}
