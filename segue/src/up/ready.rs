//! When a mesh counts as ready: the router says so and every node is healthy.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use serde::Deserialize;

/// Short against the time that loading a model takes, cheap against loopback.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);
/// A probe that takes longer is asked again.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Silence longer than this makes people wonder.
const NEWS_INTERVAL: Duration = Duration::from_secs(15);

#[derive(Deserialize)]
struct MeshStatus {
    nodes: Vec<NodeStatus>,
}

#[derive(Deserialize)]
struct NodeStatus {
    healthy: bool,
}

/// Resolves when requests can be served by `nodes` healthy nodes.
pub(super) async fn wait(listen: SocketAddr, nodes: usize) {
    let base = format!("http://{}", reachable(listen));
    let client = reqwest::Client::builder().no_proxy().timeout(PROBE_TIMEOUT).build().unwrap_or_default();
    let mut news = tokio::time::interval(NEWS_INTERVAL);
    news.tick().await;
    let mut healthy = 0;
    loop {
        tokio::select! {
            _ = news.tick() => tracing::warn!(healthy, nodes, "still waiting for nodes to become healthy"),
            () = tokio::time::sleep(PROBE_INTERVAL) => {}
        }
        healthy = healthy_nodes(&client, &base).await.unwrap_or(0);
        if healthy >= nodes && is_ready(&client, &base).await {
            return;
        }
    }
}

async fn healthy_nodes(client: &reqwest::Client, base: &str) -> reqwest::Result<usize> {
    let response = client.get(format!("{base}/mesh/status")).send().await?.error_for_status()?;
    let status: MeshStatus = response.json().await?;
    Ok(status.nodes.iter().filter(|node| node.healthy).count())
}

async fn is_ready(client: &reqwest::Client, base: &str) -> bool {
    let response = client.get(format!("{base}/health/ready")).send().await;
    response.is_ok_and(|response| response.status().is_success())
}

/// An address to listen on everywhere is not one to connect to.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcard_address_is_probed_on_loopback() {
        assert_eq!(reachable("0.0.0.0:80".parse().unwrap()).to_string(), "127.0.0.1:80");
        assert_eq!(reachable("[::]:80".parse().unwrap()).to_string(), "[::1]:80");
        assert_eq!(reachable("10.0.0.1:80".parse().unwrap()).to_string(), "10.0.0.1:80");
    }
}
