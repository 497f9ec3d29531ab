//! Opening a store after any end of its last owner: read the files, validate the runs, drain the
//! space to which dead processes may still write.

pub(crate) mod drain;
mod open;
mod validate;
