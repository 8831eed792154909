//! What helper processes do for meters: the opener opens what a workload publishes, the speaker parses it.
//!
//! To have something else done in a helper: what needs a privilege is an [`opener::Ask`], the rest a [`speaker::Request`].

pub mod opener;
pub mod speaker;

use homeostat_helper::{Domain, Service};
use homeostat_platform::PlatformError;
use speaker::{Reply, Request};
use std::os::fd::OwnedFd;
use std::time::Duration;

static SERVICE: Service = Service {
    open: opener::serve,
    speak: speaker::serve,
};

/// Starts the mother of helpers. To be called while this program has one thread and no lock; without it the first use does it.
pub fn start() {
    homeostat_helper::start(&SERVICE);
}

/// Asks the helper of a domain.
///
/// # Errors
/// `Busy`: the domain cannot be read now.
pub fn call(domain: Domain, request: &Request) -> Result<Reply, PlatformError> {
    homeostat_helper::call(&SERVICE, domain, request)
}

/// Asks a helper that is made for this one question, for so long. Nobody else waits meanwhile, and the meters of the domain go on. A
/// descriptor may come with the reply.
///
/// # Errors
/// `Busy`: the domain cannot be asked now.
pub fn call_apart(
    domain: Domain,
    request: &Request,
    patience: Duration,
) -> Result<(Reply, Option<OwnedFd>), PlatformError> {
    homeostat_helper::call_apart(&SERVICE, domain, request, patience)
}

/// Tells the helper of a domain something, if there is one.
pub fn tell(domain: Domain, request: &Request) {
    homeostat_helper::tell(domain, request);
}

#[cfg(test)]
mod tests;
