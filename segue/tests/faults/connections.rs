//! Connections that do not behave.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use rustix::process::Pid;

use crate::harness::{self, Mesh, eventually};

// L4
#[tokio::test]
async fn descriptors_come_back_after_connections_of_every_kind() {
    let (turn, client) = harness::shared().await;
    let mesh = turn.as_ref().unwrap();
    client.chat("Hello", 2, "").await;
    assert!(client.settles(Duration::from_secs(10)).await);
    let before = descriptors(mesh);
    let address = mesh.url().trim_start_matches("http://").to_owned();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n";
    let body = r#"{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "stream": true}"#;
    for round in 0..200 {
        let mut socket = TcpStream::connect(&address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        match round % 4 {
            // Nothing at all.
            0 => {}
            // A body that does not come.
            1 => write!(socket, "{head}Content-Length: 5000\r\n\r\n{{\"mess").unwrap(),
            // Closed in mid-stream.
            2 => {
                write!(socket, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
                let _ = socket.read(&mut [0; 64]).unwrap();
            }
            // One answer, and then the end.
            _ => {
                write!(socket, "{head}Connection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len())
                    .unwrap();
                let mut answer = String::new();
                socket.read_to_string(&mut answer).unwrap();
                assert!(answer.contains("[DONE]"), "{answer}");
            }
        }
    }
    let mut after = before.clone();
    let back = eventually(Duration::from_secs(60), async || {
        after = descriptors(mesh);
        after.iter().zip(&before).all(|(after, before)| *after <= before + 10)
    });
    assert!(back.await, "{before:?} before, {after:?} after");
    assert!(client.settles(Duration::from_secs(10)).await, "{:#}", client.status().await);
}

fn descriptors(mesh: &Mesh) -> Vec<usize> {
    let count = |pid: Pid| std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).unwrap().count();
    mesh.children().into_iter().map(count).collect()
}
