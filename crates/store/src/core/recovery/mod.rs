//! Opening a store, however its last owner ended: reads the files, keeps the runs that pass
//! validation, and withholds the space to which dead processes may still write until it is drained.

mod open;
mod validate;
