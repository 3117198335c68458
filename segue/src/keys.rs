//! `segue keys`: the certificate authority of a mesh and its nodes' certificates.

use std::path::PathBuf;

use clap::{Subcommand, ValueEnum};
use kv_transfer::{MeshAuthority, Role};

/// Who is who in a mesh.
#[derive(Subcommand)]
pub(crate) enum KeysCommand {
    /// Make a new mesh authority: ca.pem and ca.key.
    Init {
        /// Folder for the authority; made if missing.
        #[arg(long)]
        dir: PathBuf,
    },
    /// Make the certificate and key of one node: ca.pem, NAME.pem, NAME.key.
    Issue {
        /// Folder with the authority.
        #[arg(long)]
        dir: PathBuf,
        /// Name of the node, the same as `name` in its configuration.
        #[arg(long)]
        name: String,
        /// What the node may be.
        #[arg(long, value_enum)]
        role: RoleName,
        /// Folder for the node's files, to be its `keys_dir` [default: DIR].
        #[arg(long)]
        out: Option<PathBuf>,
    },
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum RoleName {
    Router,
    Prefill,
    Decode,
}

impl From<RoleName> for Role {
    fn from(name: RoleName) -> Self {
        match name {
            RoleName::Router => Self::Router,
            RoleName::Prefill => Self::Prefill,
            RoleName::Decode => Self::Decode,
        }
    }
}

/// Performs one `segue keys` command.
pub(crate) fn run(command: &KeysCommand) -> anyhow::Result<()> {
    match command {
        KeysCommand::Init { dir } => init(dir),
        KeysCommand::Issue { dir, name, role, out } => issue(dir, name, *role, out.as_ref().unwrap_or(dir)),
    }
}

fn init(dir: &PathBuf) -> anyhow::Result<()> {
    let key = dir.join("ca.key");
    // A second authority in its place would cut off every node of the first.
    anyhow::ensure!(!key.exists(), "{} exists already; choose another folder", key.display());
    create(dir)?;
    MeshAuthority::generate().save(dir)?;
    println!("{}", dir.join("ca.pem").display());
    Ok(())
}

fn issue(dir: &std::path::Path, name: &str, role: RoleName, out: &PathBuf) -> anyhow::Result<()> {
    kv_transfer::check_node_name(name).map_err(anyhow::Error::msg)?;
    let authority = MeshAuthority::load(dir)?;
    create(out)?;
    authority.issue(name, role.into()).save(out, name)?;
    println!("{}", out.join(format!("{name}.pem")).display());
    Ok(())
}

fn create(dir: &PathBuf) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).map_err(|error| anyhow::anyhow!("{}: {error}", dir.display()))
}
