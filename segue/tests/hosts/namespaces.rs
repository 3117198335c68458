//! Hosts as network namespaces around a switch.
//!
//! ```text
//!  root namespace ──┐
//!  router ──────────┤
//!  decode-1 ────────┤ bridge, in a namespace of its own
//!  …                ┘ every link: a veth pair with a token bucket
//! ```

use std::net::Ipv4Addr;
use std::process::{Command, Stdio};

/// Rate of a link when nothing else is said.
const RATE: &str = "2gbit";

/// The hosts; dropping it removes them with everything in them.
pub(crate) struct Hosts {
    /// Keeps runs apart that share a machine.
    tag: u32,
    names: Vec<String>,
}

impl Hosts {
    /// One host for each name, all reachable from here.
    pub(crate) fn new(names: &[&str]) -> Self {
        let tag = std::process::id();
        let hosts = Self { tag, names: names.iter().map(|name| (*name).to_owned()).collect() };
        let switch = hosts.namespace("switch");
        ip(&["netns", "add", &switch]);
        ip(&["-n", &switch, "link", "add", "br0", "type", "bridge"]);
        ip(&["-n", &switch, "link", "set", "br0", "up"]);
        for (index, name) in hosts.names.iter().enumerate() {
            let namespace = hosts.namespace(name);
            ip(&["netns", "add", &namespace]);
            let port = port(index);
            ip(&[
                "-n", &namespace, "link", "add", "eth0", "type", "veth", "peer", "name", &port, "netns",
                &switch,
            ]);
            ip(&["-n", &namespace, "addr", "add", &format!("{}/24", hosts.address(name)), "dev", "eth0"]);
            for device in ["lo", "eth0"] {
                ip(&["-n", &namespace, "link", "set", device, "up"]);
            }
            ip(&["-n", &switch, "link", "set", &port, "master", "br0", "up"]);
            hosts.limit(name, RATE);
        }
        // The tests themselves reach the switch from the root namespace.
        let here = format!("sg{}", tag % 1_000_000);
        ip(&["link", "add", &here, "type", "veth", "peer", "name", "root", "netns", &switch]);
        ip(&["addr", "add", &format!("{}/24", hosts.number(254)), "dev", &here]);
        ip(&["link", "set", &here, "up"]);
        ip(&["-n", &switch, "link", "set", "root", "master", "br0", "up"]);
        hosts
    }

    /// Address of a host.
    pub(crate) fn address(&self, name: &str) -> Ipv4Addr {
        self.number(self.index(name) as u8 + 1)
    }

    /// A program on a host, with pipes everywhere.
    pub(crate) fn command(&self, name: &str, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(name), program]).args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// Takes a host's link down.
    pub(crate) fn cut(&self, name: &str) {
        ip(&["-n", &self.namespace("switch"), "link", "set", &port(self.index(name)), "down"]);
    }

    /// Takes it up again.
    pub(crate) fn heal(&self, name: &str) {
        ip(&["-n", &self.namespace("switch"), "link", "set", &port(self.index(name)), "up"]);
    }

    /// Limits what a host can send.
    pub(crate) fn limit(&self, name: &str, rate: &str) {
        let namespace = self.namespace(name);
        let bucket = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"];
        let device = ["-n", &namespace, "qdisc", "replace", "dev", "eth0"];
        call("tc", &[&device[..], &bucket[..]].concat());
    }

    fn namespace(&self, name: &str) -> String {
        format!("segue-{}-{name}", self.tag)
    }

    fn index(&self, name: &str) -> usize {
        self.names.iter().position(|known| known == name).unwrap_or_else(|| panic!("no host {name}"))
    }

    fn number(&self, host: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, (self.tag % 250) as u8, host)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in self.names.iter().map(String::as_str).chain(["switch"]) {
            let _ = Command::new("ip").args(["netns", "del", &self.namespace(name)]).status();
        }
    }
}

fn port(index: usize) -> String {
    format!("port{index}")
}

fn ip(arguments: &[&str]) {
    call("ip", arguments);
}

fn call(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().expect("iproute2 is installed");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {}: {error}", arguments.join(" "));
}
