//! `segue`: one binary for every role of the mesh.
//!
//! ```text
//!  segue up ──starts──▶ segue router   segue prefill   segue decode
//!  segue bench          against any OpenAI-compatible server
//!  segue sim            the mesh in virtual time, under faults
//!  segue model, keys    files that the roles need
//! ```
//!
//! Job: command line, configuration files, signals, processes.
//! Not its job: anything that a role does once it runs.

mod cpus;
mod keys;
mod logging;
mod model;
mod roles;
mod signals;
mod up;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A mesh that serves one model: long prompts are prefilled elsewhere, short ones never wait.
#[derive(Parser)]
#[command(name = "segue", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a whole mesh on this machine: router, prefill and decode nodes.
    Up(up::UpArgs),
    /// Run the router: HTTP for clients, QUIC for nodes.
    Router(RoleArgs),
    /// Run a prefill node.
    Prefill(RoleArgs),
    /// Run a decode node.
    Decode(RoleArgs),
    /// Measure a running server, this one or any other that speaks OpenAI's protocol.
    #[command(subcommand)]
    Bench(bench::Command),
    /// Run the mesh in virtual time, under faults, and check every answer.
    Sim(sim::SimArgs),
    /// Fetch, inspect and convert models.
    #[command(subcommand)]
    Model(model::ModelCommand),
    /// Make the certificates of a mesh.
    #[command(subcommand)]
    Keys(keys::KeysCommand),
}

#[derive(clap::Args)]
struct RoleArgs {
    /// Configuration file (TOML); see configs/ for every key.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    logging::start(match command {
        Command::Sim(_) => logging::QUIET_FILTER,
        _ => logging::DEFAULT_FILTER,
    });
    let outcome = match command {
        Command::Up(args) => up::run(&args),
        Command::Router(args) => roles::router(&args.config),
        Command::Prefill(args) => roles::prefill(&args.config),
        Command::Decode(args) => roles::decode(&args.config),
        Command::Bench(command) => roles::bench(command),
        Command::Sim(args) => sim::command(&args),
        Command::Model(command) => model::run(&command),
        Command::Keys(command) => keys::run(&command),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}{}", logging::FATAL_PREFIX, one_line(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

/// Parsers draw their errors over several lines; a supervisor and a log want one.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_valid_definition() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn errors_stay_on_one_line() {
        assert_eq!(one_line("a.toml: \n  |\n1 | x\n"), "a.toml: | 1 | x");
    }
}
