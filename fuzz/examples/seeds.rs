//! Writes the inputs that fuzzing starts from: valid encodings of everything
//! that the targets decode. Files that are there stay as they are.
//!
//! `make fuzz-seeds`, after a format has changed or a target was added.

use std::fs;
use std::path::Path;

use engine::fuzzing::state_of;
use kv_transfer::{MeshAuthority, Role};

fn main() {
    messages();
    connections();
    engine_states();
    codecs();
    bodies();
    files();
    event_streams();
}

/// The golden bytes of every message, which are kept up to date by a test.
fn messages() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kv-transfer/tests/golden");
    for entry in fs::read_dir(golden).expect("golden bytes are there").flatten() {
        let path = entry.path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let bytes = from_hex(&fs::read_to_string(&path).expect("golden bytes are text"));
        if name == "frame_header" {
            write("frame_header", "golden", &bytes);
            continue;
        }
        write("messages", &name, &bytes);
        // In pieces of eight bytes, twice, and once more without its end.
        let mut stream = vec![7];
        for _ in 0..2 {
            stream.extend((bytes.len() as u32).to_le_bytes());
            stream.extend(&bytes);
        }
        if ["control_draining", "generate", "request_tokens", "prefill_request", "handoff_credit"]
            .contains(&&*name)
        {
            write("message_stream", &name, &stream);
            write("message_stream", &format!("{name}_cut"), &stream[..stream.len() - 9]);
        }
    }
    write("message_stream", "too_long", &[7, 0xff, 0xff, 0xff, 0xff, 5]);
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal digits");
    (0..digits.len()).step_by(2).map(byte).collect()
}

fn connections() {
    write("greeting", "ours", &kv_transfer::fuzzing::greeting());
    write("greeting", "another_version", b"segue\x4d\0\0\0");
    write("greeting", "http", b"HTTP/1.1 ");
    if corpus("certificate").join("decode").exists() {
        return;
    }
    let dir = std::env::temp_dir().join(format!("segue-fuzz-seeds-{}", std::process::id()));
    let mesh = MeshAuthority::generate();
    mesh.save(&dir).expect("the authority is saved");
    for role in [Role::Router, Role::Prefill, Role::Decode] {
        let name = role.as_str();
        mesh.issue(name, role).save(&dir, name).expect("the node is saved");
        let pem = fs::read_to_string(dir.join(format!("{name}.pem"))).expect("the node is there");
        write("certificate", name, &from_pem(&pem));
        write("credentials", name, &[&[1], pem.as_bytes()].concat());
    }
    let pem = fs::read_to_string(dir.join("ca.pem")).expect("the authority is there");
    write("certificate", "authority", &from_pem(&pem));
    write("credentials", "authority", &[&[0], pem.as_bytes()].concat());
    write("credentials", "authority_itself", &[&[3], pem.as_bytes()].concat());
    for (place, name) in [(2, "key_of_node"), (4, "key_of_authority")] {
        let text = b"-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg\n-----END PRIVATE KEY-----\n";
        write("credentials", name, &[&[place], text.as_slice()].concat());
    }
    fs::remove_dir_all(&dir).expect("own directory");
}

/// The bytes between the first and the last line of a PEM file.
fn from_pem(pem: &str) -> Vec<u8> {
    let digits = pem.lines().filter(|line| !line.starts_with("---")).flat_map(str::bytes);
    let (mut bytes, mut bits, mut held) = (Vec::new(), 0, 0u32);
    for digit in digits.filter(|&digit| digit != b'=') {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            _ => 63,
        };
        (held, bits) = (held << 6 | u32::from(value), bits + 6);
        if bits >= 8 {
            bits -= 8;
            bytes.push((held >> bits) as u8);
        }
    }
    bytes
}

fn engine_states() {
    let write_state =
        |name: &str, how: u8, bytes: &[u8]| write("engine_state", name, &[&[how], bytes].concat());
    write_state("probe", 0, &fuzz::states::state(1, 0, 0));
    write_state("probe_of_two_streams", 0, &fuzz::states::state(2, 0, 0));
    write_state("probe_of_stream_1", 4 + 1, &fuzz::states::state(2, 1, 1));
    let template = fuzz::states::two_sections().template();
    for count in [0, 1, 3] {
        write_state(&format!("state_of_{count}"), 16 + count, state_of(&template.blob(usize::from(count))));
    }
    // The first byte above 63 says how many tokens each sequence has, and which is read.
    for first in 64..64 + 18 {
        let residents = [first % 3, first / 3 % 3].map(u32::from);
        if [[1, 0], [2, 1], [1, 2], [0, 0]].contains(&residents) {
            write_state(&format!("whole_{first}"), first, &fuzz::states::whole(residents));
        }
    }
    // Count; then section, layer and side, first and last token, rows.
    let place =
        |numbers: [u16; 4]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
    let rows = |tokens: usize| vec![0x5a; 8 * tokens];
    let install =
        [&[4][..], &place([0, 0, 0, 4]), &rows(4), &place([1, 2, 1, 3]), &rows(2), &place([1, 1, 0, 1])];
    write("install_blob", "rows", &install.concat());
    let offsets = (0..6u64).flat_map(|part| (part * 16).to_le_bytes()).collect::<Vec<_>>();
    write("install_blob", "export", &[&[2][..], &offsets, &rows(12)].concat());
    write("install_blob", "export_of_none", &[&[0][..], &offsets, &rows(12)].concat());
}

fn codecs() {
    for (index, codec) in kernels::codecs().iter().enumerate() {
        for (dtype, row_bytes, tokens) in [(1u16, 8u16, 4u16), (3, 16, 2), (0, 12, 3), (2, 34, 2), (1, 8, 0)]
        {
            let row =
                kv_block::RowSpec { dtype: [0, 1, 8, 30][usize::from(dtype)], row_bytes: row_bytes.into() };
            let shape = kernels::RowsShape { row, tokens: tokens.into() };
            let rows: Vec<u8> = (0..shape.raw_bytes()).map(|at| (at * 31 + 7) as u8).collect();
            let Ok(payload) = codec.encode(shape, rows.into()) else { continue };
            let mut input = vec![index as u8];
            [dtype, row_bytes, tokens].iter().for_each(|number| input.extend(number.to_le_bytes()));
            input.extend(&payload);
            write("codecs", &format!("{}_{dtype}_{row_bytes}_{tokens}", codec.name()), &input);
        }
    }
}

fn bodies() {
    for (name, body) in [
        ("text", r#"{"model":"m","prompt":"Once upon","max_tokens":16,"stream":false}"#),
        ("texts", r#"{"prompt":["a","b \u00e9\ud83d\ude00"],"n":2,"temperature":0.5,"top_p":0.9,"seed":-7}"#),
        ("tokens", r#"{"prompt":[1,2,999.0],"top_k":-1,"min_p":0.05,"ignore_eos":true,"stop":"\n"}"#),
        (
            "token_lists",
            r#"{"prompt":[[1],[2,3]],"stop":["a","b"],"cache_salt":"me","seed":18446744073709551615}"#,
        ),
        (
            "streamed",
            r#"{"prompt":"x","stream":true,"stream_options":{"include_usage":true},"logprobs":null}"#,
        ),
        ("unsupported", r#"{"prompt":"x","logit_bias":{"1":2},"tools":[{"type":"function"}]}"#),
        ("wrong", r#"{"prompt":{"a":[[[{}]]]},"temperature":"hot","n":1e300,"max_tokens":2.5}"#),
        ("nested", "{\"prompt\":[[[[[[[[[[[[[[[[[[[[[[[[["),
    ] {
        write("completion_body", name, body.as_bytes());
    }
    for (name, body) in [
        ("user", r#"{"messages":[{"role":"user","content":"Hello!"}],"max_completion_tokens":8}"#),
        (
            "turns",
            r#"{"messages":[{"role":"system","content":"s"},{"role":"developer","content":null,"name":"d"},
            {"role":"assistant","content":" a \n"}],"temperature":0,"stop":["<|im_end|>"]}"#,
        ),
        (
            "parts",
            r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}],
            "chat_template_kwargs":{"enable_thinking":false,"messages":[1]}}"#,
        ),
        (
            "tools",
            r#"{"messages":[{"role":"assistant","tool_calls":[{"id":"1","type":"function",
            "function":{"name":"f","arguments":"{\"a\":[1,2.5e3,null,\"\u00fc\"]}"}}]},
            {"role":"tool","tool_call_id":"1","content":"x"}]}"#,
        ),
        (
            "image",
            r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:"}}]}]}"#,
        ),
        ("wrong", r#"{"messages":[{"role":"king","content":3},4,null]}"#),
    ] {
        write("chat_body", name, body.as_bytes());
    }
}

fn files() {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    for role in ["router", "prefill", "decode"] {
        let text = fs::read_to_string(configs.join(format!("{role}.toml"))).expect("the example is there");
        // Comments only make inputs longer.
        let short: Vec<_> = text
            .lines()
            .map(|line| line.trim_start_matches("# "))
            .filter(|line| line.contains('='))
            .collect();
        write("node_config", role, format!("{}{}\n", &role[..1], short.join("\n")).as_bytes());
    }
    write(
        "node_config",
        "decode_wrong",
        b"dslots = 0\nitl_cap_ms = nan\ndrain_seconds = -inf\n[x.y]\nz = [1, {a = 2}]\n",
    );
    write(
        "node_config",
        "prefill_wrong",
        b"pblock_tokens = 0\nchunk_tokens = 100\ncpus = [1024, 18446744073709551615]\n",
    );
    write(
        "node_config",
        "router_wrong",
        b"rname = \"../x\"\nlisten = \"8080\"\nfrozen_seconds = 1e9\n\"a.b\" = 1979-05-27T07:32:00Z\n",
    );
    for (name, text) in [
        ("empty", ""),
        ("all", "mode = \"always-remote\"\nlocal_below_tokens = 512\nfallback = \"refuse\"\n"),
        ("local", "mode = 'always-local'\nfallback = '''local'''\n"),
        ("wrong", "mode = \"fast\"\nlocal_below_tokens = -1\nmod = 0x1f\n[[a]]\nb = 1_000.5\n"),
        ("nested", "a = [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["),
    ] {
        write("policy_file", name, text.as_bytes());
    }
}

fn event_streams() {
    for (name, stream) in [
        (
            "chat",
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"\u{e9}\"},\"finish_reason\":\"stop\"}]}\r\n\r\ndata: [DONE]\n\n",
        ),
        (
            "usage",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":2}}}\n\n",
        ),
        ("comment", ": ping\n\nevent: x\nid: 1\ndata:one\ndata: two\n\n\n"),
        (
            "error",
            "data: {\"error\":{\"message\":\"gone\",\"code\":500}}\n\ndata: {\"error\":\"x\"}\n\ndata: <html>\n\n",
        ),
        ("cut", "data: half"),
    ] {
        write("event_stream", name, &[&[2], stream.as_bytes()].concat());
    }
}

fn corpus(target: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target)
}

fn write(target: &str, name: &str, bytes: &[u8]) {
    let dir = corpus(target);
    fs::create_dir_all(&dir).expect("the corpus can be written");
    let path = dir.join(name);
    if !path.exists() {
        fs::write(path, bytes).expect("the corpus can be written");
    }
}
