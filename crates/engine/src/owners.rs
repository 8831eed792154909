//! Trust domains: whose a workload is, what is never done across owners, and each owner's share of the budgets.
//!
//! An owner decides what its programs publish, so its counters are evidence for its own workloads only. Nothing is changed on
//! one owner's workload for another owner's gain, and settings of the whole host are root's. A guardrail may protect
//! anybody, since it only stops. Root widens this by `policy.one_owner`.

use crate::engine::Engine;
use crate::policy::Policy;
use crate::protocol::Prior;
use crate::strategy::{Declined, Opinion, Proposal};
use crate::trials::HOUR;
use crate::view::{OwnerBudget, finite_or_zero};
use homeostat_model::action::Target;
use homeostat_model::{Nanoseconds, Owner, StrategyId, Workload, WorkloadId};
use std::collections::{BTreeMap, VecDeque};

/// Of each budget, all owners but the machine may together use one part in so many: root's trials are never starved.
pub(crate) const OTHERS_PART: u32 = 2;
/// … and each of them one part in so many: one user leaves as much to the next.
pub(crate) const OWNER_PART: u32 = 4;
/// Owners that `status` lists.
const LISTED_MAX: usize = 16;

/// What owners have used of a budget.
#[derive(Debug, Default)]
pub(crate) struct Spent {
    /// When, whose, how much.
    log: VecDeque<(Nanoseconds, Owner, f64)>,
}

impl Spent {
    pub(crate) fn note(&mut self, at: Nanoseconds, owner: Owner, amount: f64) {
        self.log.push_back((at, owner, amount));
    }

    /// Forgets what was used before.
    pub(crate) fn forget_before(&mut self, from: Nanoseconds) {
        while self.log.front().is_some_and(|(at, ..)| *at < from) {
            self.log.pop_front();
        }
    }

    /// When the first of what counts was used.
    pub(crate) fn first(&self) -> Option<Nanoseconds> {
        self.first_of(|_| true)
    }

    /// How much all have used. The sum of nothing is minus zero.
    pub(crate) fn total(&self) -> f64 {
        self.of(|_| true)
    }

    fn of(&self, whose: impl Fn(&Owner) -> bool) -> f64 {
        let amounts = self
            .log
            .iter()
            .filter(|(_, owner, _)| whose(owner))
            .map(|(.., a)| a);
        amounts.sum::<f64>() + 0.0
    }

    fn first_of(&self, whose: impl Fn(&Owner) -> bool) -> Option<Nanoseconds> {
        self.log
            .iter()
            .find(|(_, owner, _)| whose(owner))
            .map(|(at, ..)| *at)
    }

    fn last_of(&self, whose: &Owner) -> Option<Nanoseconds> {
        self.log
            .iter()
            .rev()
            .find(|(_, owner, _)| owner == whose)
            .map(|(at, ..)| *at)
    }

    /// Whether one more of `amount` exceeds the budget or the owner's share of it. What alone exceeds it fits when nothing
    /// else is used: the budget delays it, and does not forbid it.
    pub(crate) fn has_no_room(&self, owner: &Owner, budget: f64, amount: f64) -> bool {
        self.total() + amount > budget.max(amount) || self.used_up_by(owner, budget, amount).is_some()
    }

    /// Whether a share is used up, and whose: `None` for that of all others together. One more of `amount` would have to fit.
    fn used_up_by<'o>(&self, owner: &'o Owner, budget: f64, amount: f64) -> Option<Option<&'o Owner>> {
        if owner.is_machine() {
            return None;
        }
        let fits = |used: f64, part: u32| used + amount <= (budget / f64::from(part)).max(amount);
        if !fits(self.of(|o| o == owner), OWNER_PART) {
            return Some(Some(owner));
        }
        (!fits(self.of(|o| !o.is_machine()), OTHERS_PART)).then_some(None)
    }
}

impl Policy {
    /// The trust domain of an owner: itself, or what a rule of root's makes of it. A rule that names the machine makes
    /// its owners the machine's.
    pub fn domain(&self, owner: &Owner) -> Owner {
        let name = owner.to_string();
        let of = |pattern: &String| crate::policy::matches(pattern, &name);
        match self.one_owner.iter().find(|rule| rule.iter().any(of)) {
            None => owner.clone(),
            Some(rule) if rule.iter().any(|p| crate::policy::matches(p, "machine")) => Owner::Machine,
            Some(rule) => Owner::Tenant(format!("one_owner:{}", rule.join("+"))),
        }
    }
}

impl Engine {
    /// Whose a workload is, by root's rules.
    pub(crate) fn domain(&self, workload: &Workload) -> Owner {
        self.policy.domain(&workload.owner)
    }

    /// The same by its name; the machine's where it is not known any more.
    pub(crate) fn domain_of(&self, id: &WorkloadId) -> Owner {
        self.workloads
            .get(id)
            .map_or(Owner::Machine, |w| self.domain(&w.workload))
    }

    /// Why nothing is changed on the one for the sake of the other; `None` where both are one owner's.
    pub(crate) fn strangers(&self, changed: &WorkloadId, gains: &WorkloadId) -> Option<String> {
        let (changed_by, gained_by) = (self.workloads.get(changed)?, self.workloads.get(gains)?);
        let (one, other) = (&changed_by.workload, &gained_by.workload);
        (self.domain(one) != self.domain(other)).then(|| {
            format!(
                "{changed} is of another owner ({}) than {gains} ({}): nothing is changed on it for the other's sake; \
                 policy.one_owner = [[\"{}\", \"{}\"]] makes them one",
                one.owner, other.owner, one.owner, other.owner
            )
        })
    }

    /// Whether what was proven of such a workload in an earlier life may be used without a trial: tenants that come and go may
    /// have one fingerprint and not be one.
    pub(crate) fn is_known_again(&self, id: &WorkloadId) -> bool {
        self.workloads.get(id).is_some_and(|w| {
            let owner = &w.workload.owner;
            !matches!(owner, Owner::Tenant(_)) || self.domain(&w.workload) != *owner
        })
    }

    /// What the history knows of a workload under the fingerprint that an earlier version gave it is known of it from now on. The
    /// new name wins where both are known.
    pub(crate) fn know_by_former_name(&mut self, workload: &Workload) {
        let Some(former) = &workload.former else { return };
        let known: Vec<Prior> = self
            .strategies
            .iter()
            .filter_map(|s| self.priors.get(&(former.clone(), s.id())))
            .cloned()
            .collect();
        for prior in known {
            let fingerprint = workload.fingerprint.clone();
            let key = (fingerprint.clone(), prior.strategy.clone());
            self.priors.entry(key).or_insert(Prior { fingerprint, ..prior });
        }
        self.recall.rename(former, &workload.fingerprint);
    }

    /// Declines a proposal that would reach over to another owner.
    pub(crate) fn within_one_owner(
        &self,
        id: &WorkloadId,
        strategy: &StrategyId,
        opinion: Opinion,
    ) -> Opinion {
        match &opinion {
            Opinion::Propose(proposal) => match self.crosses(id, strategy, proposal) {
                Some(why) => Opinion::Decline(Declined::because(why)),
                None => opinion,
            },
            _ => opinion,
        }
    }

    fn crosses(&self, id: &WorkloadId, strategy: &StrategyId, proposal: &Proposal) -> Option<String> {
        if let Target::Reader(reader) = &proposal.target {
            return self.strangers(&reader.workload, id);
        }
        // A setting of the host, or of CPUs whoever runs on them.
        let reaches = matches!(proposal.target, Target::Files(_)) || self.reaches_others(strategy);
        let owner = &self.workloads.get(id)?.workload.owner;
        (reaches && !self.policy.domain(owner).is_machine()).then(|| {
            format!(
                "{strategy}: it acts on others, too, and {id} is of {owner}: nothing of the host is changed for its sake; \
                 policy.one_owner = [[\"machine\", \"{owner}\"]] allows it"
            )
        })
    }

    /// Of two owners whose proposals are alike in urgency, the one comes first whose last trial is longer ago: a number that is larger
    /// the longer it is.
    pub(crate) fn rest_of(&self, owner: &Owner) -> Nanoseconds {
        let last = self.starts.last_of(owner);
        last.map_or(HOUR, |at| (self.now - at).min(HOUR))
    }

    /// Why an owner gets no trial now: its share of a budget is used up.
    pub(crate) fn share_used_up(&self, owner: &Owner) -> Option<String> {
        let (trials, harm) = (
            f64::from(self.policy.experiments_per_hour_max),
            self.policy.harm_exposure_per_day_max,
        );
        let whose = |owner: Option<&Owner>| match owner {
            Some(owner) => format!("{owner} has used up its share (a quarter)"),
            None => "users and tenants have used up their share (half)".to_owned(),
        };
        if let Some(by) = self.starts.used_up_by(owner, trials, 1.0) {
            let first = match by {
                Some(owner) => self.starts.first_of(|o| o == owner),
                None => self.starts.first_of(|o| !o.is_machine()),
            };
            let left = first.map_or(HOUR, |at| (at + HOUR).saturating_sub(self.now));
            return Some(format!(
                "{} of the {trials:.0} experiments per hour; the next waits {left} (`experiments_per_hour_max` allows more)",
                whose(by)
            ));
        }
        let by = self.exposure.used_up_by(owner, harm, 0.0)?;
        Some(format!(
            "{} of the daily budget of harm exposure; no new trial today",
            whose(by)
        ))
    }

    /// What owners other than the machine have used of the budgets, for people.
    pub(crate) fn owner_budgets(&self) -> Vec<OwnerBudget> {
        let part = |budget: f64, least: f64| (budget / f64::from(OWNER_PART)).max(least.min(budget));
        let mut owners: BTreeMap<&Owner, (f64, f64)> = BTreeMap::new();
        for (_, owner, amount) in &self.starts.log {
            owners.entry(owner).or_default().0 += amount;
        }
        for (_, owner, amount) in &self.exposure.log {
            owners.entry(owner).or_default().1 += amount;
        }
        owners
            .into_iter()
            .filter(|(owner, _)| !owner.is_machine())
            .take(LISTED_MAX)
            .map(|(owner, (trials, harm))| OwnerBudget {
                owner: owner.to_string(),
                experiments_last_hour: trials as u32,
                experiments_per_hour_max: part(f64::from(self.policy.experiments_per_hour_max), 1.0) as u32,
                harm_exposure_day: finite_or_zero(harm),
                harm_exposure_per_day_max: finite_or_zero(part(self.policy.harm_exposure_per_day_max, 0.0)),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn owner() -> impl proptest::strategy::Strategy<Value = Owner> {
        prop_oneof![
            Just(Owner::Machine),
            (1000u32..1006).prop_map(Owner::User),
            (0u8..3).prop_map(|n| Owner::Tenant(format!("pod:{n}"))),
        ]
    }

    proptest! {
        /// Whatever the others do, root has half of the budget left, and a second user a quarter as long as one alone is greedy.
        #[test]
        fn nobody_uses_up_anothers_share(wishes in proptest::collection::vec(owner(), 0..200), budget in 4u32..60) {
            let mut spent = Spent::default();
            let mut of: BTreeMap<Owner, u32> = BTreeMap::new();
            for (at, owner) in wishes.into_iter().enumerate() {
                if spent.used_up_by(&owner, f64::from(budget), 1.0).is_none() && !owner.is_machine() {
                    spent.note(Nanoseconds(at as u64), owner.clone(), 1.0);
                    *of.entry(owner).or_default() += 1;
                }
            }
            prop_assert!(spent.total() <= f64::from(budget / OTHERS_PART));
            prop_assert!(of.values().all(|n| *n <= budget / OWNER_PART));
            prop_assert_eq!(spent.used_up_by(&Owner::Machine, f64::from(budget), 1.0), None);
        }
    }

    #[test]
    fn root_joins_owners_by_rule() {
        let mut policy = Policy::default();
        let (one, two) = (Owner::User(1000), Owner::User(1001));
        let pod = |name: &str| Owner::Tenant(format!("pod:{name}"));
        assert_ne!(policy.domain(&one), policy.domain(&two));
        assert_eq!(policy.domain(&Owner::Machine), Owner::Machine);
        policy.one_owner = vec![vec!["user:1000".into(), "user:1001".into()], vec!["pod:*".into()]];
        assert_eq!(policy.domain(&one), policy.domain(&two));
        assert_eq!(policy.domain(&pod("a")), policy.domain(&pod("b")));
        assert_ne!(policy.domain(&pod("a")), policy.domain(&one));
        assert_ne!(policy.domain(&one), Owner::Machine);
        policy.one_owner = vec![vec!["*".into()]];
        assert_eq!(policy.domain(&pod("a")), Owner::Machine);
    }
}
