//! # ritornello-operations
//!
//! The operations of the command `ritornello` on stores, remotes and traces: one module for each,
//! with its arguments and a function `run`; `space` has the three operations `resize`, `paths` and
//! `destroy`, and `restore` a part of `paths`.
//!
//! **Must not know** how a store works: operations call other crates and print the answers.

#![forbid(unsafe_code)]

pub mod convert;
pub mod doctor;
pub mod explain;
mod explanation_text;
pub mod fsck;
pub mod remote;
mod request_text;
pub mod restore;
mod savings;
pub mod serve;
pub mod simulate;
pub mod space;
pub mod stat;
pub mod top;
