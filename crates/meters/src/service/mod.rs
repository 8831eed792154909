//! Services of helper processes for meters: the opener opens what a workload publishes, and the speaker parses it.
//!
//! To add a service: a request that needs a privilege is an [`opener::Ask`], any other a [`speaker::Request`].

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

/// Starts the parent of the helpers, while this program has one thread and no lock. Otherwise the first use does.
pub fn start() {
    homeostat_helper::start(&SERVICE);
}

/// Asks the helper of a domain.
///
/// # Errors
/// `Busy`: the domain cannot be asked now.
pub fn call(domain: Domain, request: &Request) -> Result<Reply, PlatformError> {
    homeostat_helper::call(&SERVICE, domain, request)
}

/// Asks a separate helper, made for this question, within this time. Other callers and the domain's meters go on. A
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

/// Sends a message to the helper of a domain, if there is one.
pub fn tell(domain: Domain, request: &Request) {
    homeostat_helper::tell(domain, request);
}

#[cfg(test)]
mod tests;
