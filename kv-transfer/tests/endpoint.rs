//! Who gets in, who does not, and what they are told.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "tests")]

mod mesh;

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_transfer::*;
use mesh::{bind, local, pair, within};
use quinn::crypto::rustls::QuicClientConfig;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

#[tokio::test]
async fn both_sides_know_the_certified_name_and_role_of_the_other() {
    let pair = pair().await;
    assert_eq!((pair.to_prefill.peer_name(), pair.to_prefill.peer_role()), ("prefill-0", Role::Prefill));
    assert_eq!((pair.to_decode.peer_name(), pair.to_decode.peer_role()), ("decode-0", Role::Decode));
    assert_eq!(pair.to_prefill.remote_address(), pair.prefill.local_address());
}

#[tokio::test]
async fn a_peer_of_another_authority_is_refused_and_the_error_says_so() {
    let ours = MeshAuthority::generate();
    let theirs = MeshAuthority::generate();
    let prefill = bind(&ours, "prefill-0", Role::Prefill);
    let stranger = bind(&theirs, "decode-0", Role::Decode);
    let error = stranger.connect(prefill.local_address(), Role::Prefill).await.err().unwrap().to_string();
    assert!(error.contains(&prefill.local_address().to_string()), "{error}");
    assert!(error.contains("certificate") && error.contains("UnknownIssuer"), "{error}");
}

#[tokio::test]
async fn a_peer_of_another_role_is_refused_and_both_roles_are_named() {
    let authority = MeshAuthority::generate();
    let decode = bind(&authority, "decode-1", Role::Decode);
    let node = bind(&authority, "decode-0", Role::Decode);
    let error = node.connect(decode.local_address(), Role::Prefill).await.err().unwrap().to_string();
    assert!(error.contains("prefill.segue") && error.contains("decode.segue"), "{error}");
}

/// A client that trusts `trusted`'s authority but shows what it is given.
struct Outsider {
    quinn: quinn::Endpoint,
    config: quinn::ClientConfig,
}

impl Outsider {
    fn new(trusted: &MeshAuthority, shown: Option<&MeshAuthority>, alpn: &[u8]) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let (ca, ..) = pem_of(trusted);
        let mut roots = rustls::RootCertStore::empty();
        roots.add(ca).unwrap();
        let builder = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots);
        let mut tls = match shown.map(pem_of) {
            Some((_, certificate, key)) => builder.with_client_auth_cert(vec![certificate], key).unwrap(),
            None => builder.with_no_client_auth(),
        };
        tls.alpn_protocols = vec![alpn.to_vec()];
        let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
        Self { quinn: quinn::Endpoint::client(local()).unwrap(), config }
    }

    /// How its attempt ends.
    async fn try_connect(&self, address: SocketAddr) -> String {
        let connecting = self.quinn.connect_with(self.config.clone(), address, "prefill.segue").unwrap();
        match connecting.await {
            Ok(connection) => within(5, "the refusal", connection.closed()).await.to_string(),
            Err(error) => error.to_string(),
        }
    }
}

fn pem_of(
    authority: &MeshAuthority,
) -> (CertificateDer<'static>, CertificateDer<'static>, PrivateKeyDer<'static>) {
    let dir = tempfile::tempdir().unwrap();
    authority.issue("outsider", Role::Decode).save(dir.path(), "outsider").unwrap();
    let path = |name: &str| dir.path().join(name);
    (
        CertificateDer::from_pem_file(path("ca.pem")).unwrap(),
        CertificateDer::from_pem_file(path("outsider.pem")).unwrap(),
        PrivateKeyDer::from_pem_file(path("outsider.key")).unwrap(),
    )
}

#[tokio::test]
async fn clients_without_a_mesh_certificate_are_refused_and_members_still_get_in() {
    let ours = MeshAuthority::generate();
    let theirs = MeshAuthority::generate();
    let prefill = bind(&ours, "prefill-0", Role::Prefill);
    let address = prefill.local_address();
    let anonymous = Outsider::new(&ours, None, MESH_ALPN).try_connect(address).await;
    assert!(anonymous.contains("116"), "expected the alert certificate_required: {anonymous}");
    let stranger = Outsider::new(&ours, Some(&theirs), MESH_ALPN).try_connect(address).await;
    assert!(stranger.contains("48"), "expected the alert unknown_ca: {stranger}");
    let other_protocol = Outsider::new(&ours, Some(&ours), b"h3").try_connect(address).await;
    assert!(other_protocol.contains("120"), "expected the alert no_application_protocol: {other_protocol}");

    let decode = bind(&ours, "decode-0", Role::Decode);
    let (connected, accepted) = tokio::join!(decode.connect(address, Role::Prefill), prefill.accept());
    connected.unwrap();
    assert_eq!(accepted.unwrap().peer_name(), "decode-0", "a refused peer was handed out");
}

/// A relay that loses every answer, so that handshakes begin and never end.
fn one_way_relay(target: SocketAddr) -> SocketAddr {
    let socket = UdpSocket::bind(local()).unwrap();
    let address = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((bytes, from)) = socket.recv_from(&mut buffer) {
            if from != target {
                let _ = socket.send_to(&buffer[..bytes], target);
            }
        }
    });
    address
}

#[tokio::test]
async fn handshakes_that_never_end_keep_nobody_out() {
    let authority = MeshAuthority::generate();
    let prefill = bind(&authority, "prefill-0", Role::Prefill);
    let relay = one_way_relay(prefill.local_address());
    let outsider = Outsider::new(&authority, None, MESH_ALPN);
    let stuck: Vec<_> = (0..500)
        .map(|_| outsider.quinn.connect_with(outsider.config.clone(), relay, "prefill.segue").unwrap())
        .collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let decode = bind(&authority, "decode-0", Role::Decode);
    within(1, "a real connection", async {
        let (connected, accepted) =
            tokio::join!(decode.connect(prefill.local_address(), Role::Prefill), prefill.accept());
        connected.unwrap();
        accepted.unwrap();
    })
    .await;
    drop(stuck);
}

#[tokio::test]
async fn noise_on_the_port_is_ignored() {
    let pair = pair().await;
    let noise = UdpSocket::bind(local()).unwrap();
    for length in 0..1400 {
        let bytes: Vec<u8> = (0..length).map(|index| (index * 31 + length * 7) as u8).collect();
        noise.send_to(&bytes, pair.prefill.local_address()).unwrap();
    }
    let (mut sender, _answer) = pair.to_prefill.open().await.unwrap();
    sender.send(&HandoffMessage::Installed).await.unwrap();
    let (_reply, mut receiver) = within(2, "the message", pair.to_decode.accept()).await.unwrap();
    assert!(receiver.recv::<HandoffMessage>().await.unwrap().is_some());
}

#[tokio::test]
async fn a_silent_address_is_given_up_after_five_seconds_and_named() {
    let silent = UdpSocket::bind(local()).unwrap();
    let node = bind(&MeshAuthority::generate(), "decode-0", Role::Decode);
    let address = silent.local_addr().unwrap();
    let error = within(7, "giving up", node.connect(address, Role::Prefill)).await.err().unwrap();
    assert_eq!(error.to_string(), format!("connect to prefill at {address}: no answer"));
}

#[tokio::test]
async fn closing_an_endpoint_tells_the_peer_and_ends_accept() {
    let pair = pair().await;
    pair.prefill.close();
    assert!(pair.prefill.accept().await.is_none());
    let error = within(2, "the close", pair.to_prefill.closed()).await;
    assert!(error.to_string().contains("the node stopped"), "{error}");
    assert!(pair.to_prefill.is_closed() && pair.to_prefill.open().await.is_err());
    within(5, "saying goodbye", pair.prefill.wait_idle()).await;
}

#[tokio::test]
async fn a_connection_outlives_its_endpoints() {
    let mesh::Pair { decode, prefill, to_prefill, to_decode } = pair().await;
    drop((decode, prefill));
    tokio::time::sleep(Duration::from_millis(100)).await;
    let (mut sender, _answer) = to_prefill.open().await.unwrap();
    sender.send(&HandoffMessage::Installed).await.unwrap();
    let (_reply, mut receiver) = within(2, "the stream", to_decode.accept()).await.unwrap();
    assert!(receiver.recv::<HandoffMessage>().await.unwrap().is_some());
}

#[tokio::test]
async fn a_used_port_and_a_too_large_packet_are_named() {
    let authority = MeshAuthority::generate();
    let first = bind(&authority, "prefill-0", Role::Prefill);
    let credentials = authority.issue("prefill-1", Role::Prefill);
    let bind = |address, mtu_bytes| {
        Endpoint::bind(address, &credentials, &Tuning { mtu_bytes }).err().unwrap().to_string()
    };
    let used = bind(first.local_address(), 1200);
    assert!(used.contains(&first.local_address().to_string()) && used.contains("in use"), "{used}");
    assert!(bind(local(), 9000).contains("allowed 1200 to 6500"));
}

#[tokio::test]
async fn large_packets_are_in_use_within_a_moment() {
    let pair = pair().await;
    let start = Instant::now();
    within(2, "discovery of the packet size", async {
        while pair.to_decode.mtu_bytes() < 6400 || pair.to_prefill.mtu_bytes() < 6400 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    eprintln!("packets of {} bytes after {:?}", pair.to_decode.mtu_bytes(), start.elapsed());
}

#[test]
fn a_killed_and_restarted_peer_is_noticed_long_before_the_idle_time() {
    let authority = MeshAuthority::generate();
    let credentials = authority.issue("prefill-0", Role::Prefill);
    let node = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let peer = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let bind_peer = |runtime: &tokio::runtime::Runtime, address| {
        runtime.block_on(async { Endpoint::bind(address, &credentials, &Tuning::default()).unwrap() })
    };
    let first_life = peer();
    let endpoint = bind_peer(&first_life, local());
    let address = endpoint.local_address();
    let decode = node.block_on(async { bind(&authority, "decode-0", Role::Decode) });
    let connection = node.block_on(decode.connect(address, Role::Prefill)).unwrap();
    // Killed: nobody is told.
    first_life.shutdown_timeout(Duration::from_secs(2));
    drop(endpoint);

    let second_life = peer();
    let _endpoint = bind_peer(&second_life, address);
    let error = node.block_on(within(4, "noticing the restart", connection.closed()));
    assert!(error.to_string().contains("restarted"), "{error}");
    node.block_on(decode.connect(address, Role::Prefill)).unwrap();
}
