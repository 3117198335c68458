//! Who runs where: the files that the children read.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};

use anyhow::Context;
use kv_transfer::{MeshAuthority, Role};
use serde::Serialize;
use tempfile::TempDir;

use super::UpArgs;
use super::child::Spec;
use crate::{cpus, model};

/// Time that running streams get after the first signal.
pub(super) const DRAIN_SECONDS: u64 = 30;

/// Everything decided and written before the first child starts.
pub(super) struct Plan {
    listen: SocketAddr,
    children: Vec<Spec>,
    shared: bool,
    /// Removed when the plan is dropped.
    _temporary: Option<TempDir>,
}

#[derive(Serialize)]
struct RouterFile<'a> {
    name: &'a str,
    listen: SocketAddr,
    mesh_listen: SocketAddr,
    model: &'a Path,
    keys_dir: &'a Path,
    policy: Option<&'a Path>,
    allow_route_override: bool,
    drain_seconds: u64,
}

#[derive(Serialize)]
struct NodeFile<'a> {
    name: &'a str,
    listen: SocketAddr,
    router: SocketAddr,
    model: &'a Path,
    keys_dir: &'a Path,
    cpus: &'a [usize],
    threads: usize,
    drain_seconds: u64,
}

impl Plan {
    /// Checks what can be checked, makes keys and writes the configurations.
    pub(super) fn make(args: &UpArgs) -> anyhow::Result<Self> {
        let model = model::resolve(&args.model)?;
        let policy = args.policy.as_deref().map(policy_path).transpose()?;
        let listen = reserve(args.listen)?;
        let nodes = usize::from(args.decode_nodes) + usize::from(args.prefill_nodes);
        let mut mesh_addresses = free_mesh_addresses(1 + nodes)?.into_iter();
        let mut next_address = || mesh_addresses.next().context("every node has an address");
        let mesh = next_address()?;
        let (data, temporary) = data_dir(args.data_dir.as_deref())?;
        let (keys, run) = (data.join("keys"), data.join("run"));
        for dir in [&keys, &run] {
            std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        }
        let division =
            cpus::divide(&cpus::allowed()?, usize::from(args.decode_nodes), usize::from(args.prefill_nodes));

        let mut mesh_files = MeshFiles { authority: MeshAuthority::generate(), run, children: Vec::new() };
        let router = RouterFile {
            name: "router",
            listen,
            mesh_listen: mesh,
            model: &model,
            keys_dir: &keys,
            policy: policy.as_deref(),
            allow_route_override: true,
            drain_seconds: DRAIN_SECONDS,
        };
        mesh_files.add("router", Role::Router, router.name, &keys, &router)?;
        let nodes =
            [("decode", Role::Decode, &division.decode), ("prefill", Role::Prefill, &division.prefill)];
        for (role, certified, sets) in nodes {
            for (index, cpus) in sets.iter().enumerate() {
                let name = format!("{role}-{}", index + 1);
                let node = NodeFile {
                    name: &name,
                    listen: next_address()?,
                    router: mesh,
                    model: &model,
                    keys_dir: &keys,
                    cpus,
                    threads: division.threads,
                    drain_seconds: DRAIN_SECONDS,
                };
                mesh_files.add(role, certified, &name, &keys, &node)?;
            }
        }
        let shared = division.is_shared();
        Ok(Self { listen, children: mesh_files.children, shared, _temporary: temporary })
    }

    /// Where clients connect.
    pub(super) fn listen(&self) -> SocketAddr {
        self.listen
    }

    /// All processes, the router first.
    pub(super) fn children(&self) -> &[Spec] {
        &self.children
    }

    /// Nodes without the router.
    pub(super) fn nodes(&self) -> usize {
        self.children.len() - 1
    }

    /// Whether nodes share processors.
    pub(super) fn is_shared(&self) -> bool {
        self.shared
    }
}

/// Writes what each child reads.
struct MeshFiles {
    authority: MeshAuthority,
    run: PathBuf,
    children: Vec<Spec>,
}

impl MeshFiles {
    fn add(
        &mut self,
        role: &'static str,
        certified: Role,
        name: &str,
        keys: &Path,
        file: &impl Serialize,
    ) -> anyhow::Result<()> {
        self.authority.issue(name, certified).save(keys, name)?;
        let config = self.run.join(format!("{name}.toml"));
        let text = toml::to_string(file).with_context(|| config.display().to_string())?;
        std::fs::write(&config, text).with_context(|| config.display().to_string())?;
        self.children.push(Spec { name: name.to_owned(), role, config });
        Ok(())
    }
}

/// The system chooses a port.
const LOOPBACK_ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

fn policy_path(path: &Path) -> anyhow::Result<PathBuf> {
    path.canonicalize().with_context(|| format!("policy {}", path.display()))
}

/// Fails early, with the address in the message, where the router could not listen.
fn reserve(listen: SocketAddr) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind(listen).with_context(|| format!("cannot listen on {listen}"))?;
    listener.local_addr().with_context(|| listen.to_string())
}

/// Ports that outlive their processes: nodes must know the router's before it
/// listens, and a node that is killed and started again on its old port tells
/// its peers at once that their connections are dead (RFC 9000, section 10.3).
fn free_mesh_addresses(count: usize) -> anyhow::Result<Vec<SocketAddr>> {
    // All are held until the last one is chosen, so that they differ.
    let sockets: std::io::Result<Vec<_>> = (0..count).map(|_| UdpSocket::bind(LOOPBACK_ANY)).collect();
    sockets
        .and_then(|sockets| sockets.iter().map(UdpSocket::local_addr).collect())
        .context("cannot find free UDP ports on the loopback interface")
}

fn data_dir(chosen: Option<&Path>) -> anyhow::Result<(PathBuf, Option<TempDir>)> {
    let Some(dir) = chosen else {
        let temporary = tempfile::Builder::new()
            .prefix("segue-")
            .tempdir()
            .context("cannot make a temporary folder; name one with --data-dir")?;
        return Ok((temporary.path().to_owned(), Some(temporary)));
    };
    std::fs::create_dir_all(dir).with_context(|| format!("data folder {}", dir.display()))?;
    let dir = dir.canonicalize().with_context(|| format!("data folder {}", dir.display()))?;
    Ok((dir, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_port_is_named() {
        let taken = TcpListener::bind(LOOPBACK_ANY).unwrap();
        let address = taken.local_addr().unwrap();
        let error = format!("{:#}", reserve(address).unwrap_err());
        assert!(error.starts_with(&format!("cannot listen on {address}: ")), "{error}");
    }

    #[test]
    fn port_zero_becomes_a_real_port() {
        assert_ne!(reserve(LOOPBACK_ANY).unwrap().port(), 0);
    }

    #[test]
    fn mesh_ports_differ() {
        let mut addresses = free_mesh_addresses(20).unwrap();
        addresses.sort();
        addresses.dedup();
        assert_eq!(addresses.len(), 20);
    }

    #[test]
    fn missing_policy_is_named() {
        let error = format!("{:#}", policy_path(Path::new("/nonexistent/policy.toml")).unwrap_err());
        assert!(error.starts_with("policy /nonexistent/policy.toml: "), "{error}");
    }
}
