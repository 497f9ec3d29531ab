//! Another process of this command, which runs a part of a measurement.

use ritornello_terminal::Context;
use ritornello_terminal::exit::Failure;
use std::process::Command;

/// Returns a command that runs `bench part` of this program; the caller appends the name of the
/// part and its arguments.
///
/// # Errors
/// If the path of this program is unknown.
pub fn self_command(context: &Context) -> Result<Command, Failure> {
    let Some((program, first)) = context.self_command.split_first() else {
        return Err(Failure::failed(
            "the path of this program is unknown",
            "this program by its full path",
        ));
    };
    let mut command = Command::new(program);
    command.args(first).args(["bench", "part"]);
    Ok(command)
}
