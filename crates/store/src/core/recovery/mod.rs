//! Opening a store after any end of its last owner: read the files, keep the runs that validation
//! passes, withhold the space to which dead processes may still write until it is drained.

mod open;
mod validate;
