//! Another process of this command, which runs a part of a measurement.

use ritornello_terminal::Context;
use ritornello_terminal::exit::Failure;
use std::process::Command;

/// Returns the command line that starts this program, up to the name of a part.
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
