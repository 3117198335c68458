//! What must not be seen or reached from outside.

use std::collections::BTreeSet;

use serde_json::json;

use crate::harness::{self, Mesh, long_prompt};

const SECRET: &str = "zanzibar7731";

// K5
#[tokio::test]
async fn prompts_and_answers_are_in_no_log_error_or_metric() {
    let _turn = harness::alone().await;
    let mesh = Mesh::start(&[]);
    let client = mesh.client();
    let message = format!("Repeat this word: {SECRET}");
    let answer = client.chat(&message, 16, "").await;
    assert_eq!(answer.status, 200);
    client.chat(&format!("{} {message}", long_prompt(501, 500)), 4, "").await;
    client.leave(&message, 400, std::time::Duration::from_millis(100)).await;
    let mut seen = String::new();
    for body in [
        json!({"messages": [{"role": "user", "content": [{"type": "image_url", "text": SECRET}]}]}),
        json!({"messages": [{"role": "user", "content": message}], "temperature": SECRET}),
        json!({"messages": [{"role": "user", "content": message}], "stop": [{ SECRET: 1 }]}),
        json!({"messages": [{"role": "user", "content": format!("{message} ").repeat(3000)}]}),
        json!({"prompt": SECRET, "max_tokens": -1}),
    ] {
        let refused = client.post("/v1/chat/completions", &body, "").await;
        assert!((400..500).contains(&refused.status), "{refused:?}");
        seen.push_str(&refused.body.to_string());
    }
    let broken = format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"{SECRET}");
    seen.push_str(&client.post_raw("/v1/chat/completions", broken).await.body.to_string());
    seen.push_str(&client.page("/metrics").await);
    seen.push_str(&client.status().await.to_string());
    seen.push_str(&mesh.log());
    assert!(!seen.contains(SECRET), "{seen}");
}

// K1
#[tokio::test]
async fn nothing_listens_beyond_loopback_by_default() {
    let (turn, _client) = harness::shared().await;
    let mesh = turn.as_ref().unwrap();
    let mut open = 0;
    for pid in mesh.children() {
        let inodes = socket_inodes(pid.as_raw_nonzero().get());
        for (table, listening) in [("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")] {
            let text =
                std::fs::read_to_string(format!("/proc/{}/net/{table}", pid.as_raw_nonzero())).unwrap();
            for line in text.lines().skip(1) {
                let fields: Vec<&str> = line.split_whitespace().collect();
                if fields[3] != listening || !inodes.contains(fields[9]) {
                    continue;
                }
                open += 1;
                let address = fields[1].split(':').next().unwrap();
                // 127.0.0.0/8 in the byte order of the table, or ::1.
                let loopback = address.ends_with("7F") || address == "00000000000000000000000001000000";
                assert!(loopback, "{table}: {line}");
            }
        }
    }
    assert!(open >= 4, "{open} sockets: HTTP, the router's mesh port and two nodes at least");
}

fn socket_inodes(pid: i32) -> BTreeSet<String> {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files
        .filter_map(|file| std::fs::read_link(file.path()).ok())
        .filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect()
}

// K4
#[tokio::test]
async fn there_is_no_path_to_files() {
    let (_turn, client) = harness::shared().await;
    for path in [
        "/slots/0?action=save",
        "/slots/0?action=restore",
        "/v1/files",
        "/props",
        "/../../etc/passwd",
        "/v1/models/..%2f..%2fetc%2fpasswd",
    ] {
        let answer = client.post(path, &json!({"filename": "../../x"}), "").await;
        assert!([404, 405].contains(&answer.status), "{path}: {answer:?}");
    }
}
