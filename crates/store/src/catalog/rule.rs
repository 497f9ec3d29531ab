//! How each request is carried to an owner that may wait for a disk, die, fall silent, or refuse
//! its clients.
//!
//! The code that carries requests, over a socket and to another owner, reads a request's rule from
//! this module. If the owner changes before it has answered, a request that expects a response is
//! repeated at the new owner, unless the request commits a reservation.

use super::message::Request;
use super::types::LeaseNumber;
use crate::permissions::ClientCall;
use std::time::Duration;

/// How a request is sent: its time limit, whether it is repeated, its result if the owner does not
/// answer, and whether an operator may deny it to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallRule {
    /// The event that the owner may wait for before it answers.
    pub wait: CallWait,
    /// Whether the request begins, commits or aborts a reservation.
    pub reservation: Reservation,
    /// Whether the response acknowledges changes that are not durable yet, or makes them durable.
    pub effect: Effect,
    /// The result of the call while the owner is silent or reopens the store.
    pub unanswered: Unanswered,
    /// Whether a client waits for a response.
    pub has_response: bool,
    /// The name in the policy file under which an operator can deny the request to clients; `None`
    /// if it cannot be denied.
    pub permission: Option<ClientCall>,
}

/// The event that an owner may wait for before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallWait {
    /// Waits for nothing.
    Nothing,
    /// Waits for its disk.
    Disk,
    /// Waits for space, at most for this duration.
    Space(Duration),
}

/// Whether a request begins, commits or aborts a reservation. A reservation belongs to one owner
/// epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reservation {
    /// Neither begins, commits nor aborts a reservation.
    Unrelated,
    /// Begins a reservation. If the request is repeated at another owner, the earlier attempt may
    /// have reserved space too. A process has another name at each owner, and the space of the
    /// earlier attempt stays withheld until the process unlocks the lock file of its earlier name.
    Begins,
    /// Commits the reservation: sent once, and only to the owner that issued it. If that owner ends
    /// before it answers, the call fails, and the pages may be put again.
    Commits(u64),
    /// Aborts the reservation: sent to the issuer if it is alive, otherwise to the next owner,
    /// which found the reservation in the log.
    Aborts(u64),
}

/// Whether a response acknowledges changes that are not durable yet, or makes them durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Acknowledges no change that a later flush must make durable.
    Nothing,
    /// May acknowledge a put or delete that is not durable before the next flush.
    Acknowledges,
    /// Makes durable everything that the same owner acknowledged before.
    Flushes,
}

/// The result of a call while the owner is silent or reopens the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// The error [`OwnerSilent`](crate::OwnerSilent) or [`StoreReopening`](crate::StoreReopening).
    Error,
    /// Success. With a silent owner, the call is made when the owner answers. With an owner that
    /// reopens the store, no call is needed: leases and reservations end with the core that granted
    /// them.
    Later(LaterCall),
    /// In a process that reopens the store, or closes it because its path leads to another store,
    /// the last statistics of the process's core. In other processes, the same as `Error`.
    LastFigures,
}

/// A call that is made when a silent owner answers again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaterCall {
    /// Releases a lease, which expires otherwise.
    Release(LeaseNumber),
    /// Aborts a reservation, whose space is withheld until then.
    Abort(u64),
}

impl LaterCall {
    /// The request to send.
    #[must_use]
    pub const fn request(self) -> Request<'static> {
        match self {
            Self::Release(lease) => Request::Release { lease },
            Self::Abort(reservation) => Request::Abort { reservation },
        }
    }
}

impl CallRule {
    /// The rule of a request that is sent again to the next owner if the owner is lost during the
    /// call, and whose response acknowledges nothing that a flush must make durable. The owner
    /// answers most such requests from memory, or from the files of the index `lsm`. Eight requests
    /// may wait for a disk with any index, within the time limit of requests that wait for nothing:
    /// `Keys` reads run headers, `ReportDamage` reads the page, `Stats` lists the directories of
    /// the volumes, `Abort` writes to the reservation log, `Resolve` with `create` syncs the scope
    /// registry, and `Scopes`, `Explain` and `ExplainRequest` may wait for such a sync.
    const QUESTION: Self = Self {
        wait: CallWait::Nothing,
        reservation: Reservation::Unrelated,
        effect: Effect::Nothing,
        unanswered: Unanswered::Error,
        has_response: true,
        permission: None,
    };

    /// Whether the failover to another owner (`node/src/failover_catalog.rs`) keeps no record of
    /// the request, because the request changes no reservation and acknowledges nothing.
    #[must_use]
    pub fn is_question(&self) -> bool {
        self.reservation == Reservation::Unrelated && self.effect == Effect::Nothing
    }

    const fn denied_as(call: ClientCall) -> Self {
        Self { wait: CallWait::Disk, permission: Some(call), ..Self::QUESTION }
    }
}

impl Request<'_> {
    /// The rule of this request.
    #[must_use]
    pub fn rule(&self) -> CallRule {
        const QUESTION: CallRule = CallRule::QUESTION;
        let wait = CallWait::Disk;
        match *self {
            Self::Resolve { .. }
            | Self::Probe { .. }
            | Self::Lease { .. }
            | Self::BeginRead { .. }
            | Self::Exists { .. }
            | Self::ReportDamage { .. }
            | Self::ReportFailedWrites { .. }
            | Self::Touch { .. }
            | Self::Scopes { .. }
            | Self::Keys { .. }
            | Self::Explain { .. }
            | Self::Decisions { .. }
            | Self::ExplainRequest { .. } => QUESTION,
            Self::Release { lease } => {
                let unanswered = Unanswered::Later(LaterCall::Release(lease));
                CallRule { unanswered, has_response: false, ..QUESTION }
            }
            Self::ReportSpeeds { .. }
            | Self::ReportTransfers { .. }
            | Self::ReportDecisions { .. }
            | Self::ReportQueues { .. } => CallRule { has_response: false, ..QUESTION },
            Self::Reserve { ref reserve_request, .. } => {
                let wait = CallWait::Space(reserve_request.timeout);
                let (reservation, effect) = (Reservation::Begins, Effect::Acknowledges);
                CallRule { wait, reservation, effect, ..QUESTION }
            }
            Self::Commit { reservation, .. } => {
                let reservation = Reservation::Commits(reservation);
                CallRule { wait, reservation, effect: Effect::Acknowledges, ..QUESTION }
            }
            Self::Abort { reservation } => {
                let unanswered = Unanswered::Later(LaterCall::Abort(reservation));
                let reservation = Reservation::Aborts(reservation);
                CallRule { reservation, unanswered, ..QUESTION }
            }
            Self::Delete { .. } => CallRule { wait, effect: Effect::Acknowledges, ..QUESTION },
            Self::DropScope { .. } => CallRule::denied_as(ClientCall::DropScope),
            Self::Configure { .. } => CallRule::denied_as(ClientCall::Configure),
            Self::ChangeCapacity { .. } => CallRule::denied_as(ClientCall::ChangeCapacity),
            Self::Clear => CallRule::denied_as(ClientCall::Clear),
            Self::Flush => CallRule { wait, effect: Effect::Flushes, ..QUESTION },
            Self::Stats => CallRule { unanswered: Unanswered::LastFigures, ..QUESTION },
        }
    }
}
