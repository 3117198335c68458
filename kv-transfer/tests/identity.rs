//! Certificate files: what is written, and what is said of files that are wrong.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use kv_transfer::*;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn keys_are_readable_by_their_owner_only() {
    let dir = tempfile::tempdir().unwrap();
    let authority = MeshAuthority::generate();
    // A key file that was left open is closed.
    fs::write(dir.path().join("ca.key"), "old").unwrap();
    authority.save(dir.path()).unwrap();
    authority.issue("decode-0", Role::Decode).save(dir.path(), "decode-0").unwrap();
    assert_eq!(mode(&dir.path().join("ca.key")), 0o600);
    assert_eq!(mode(&dir.path().join("decode-0.key")), 0o600);
    assert_eq!(mode(&dir.path().join("decode-0.pem")), 0o644);
}

#[test]
fn an_authority_read_from_files_issues_certificates_of_the_same_mesh() {
    let dir = tempfile::tempdir().unwrap();
    MeshAuthority::generate().save(dir.path()).unwrap();
    let authority = MeshAuthority::load(dir.path()).unwrap();
    authority.issue("prefill-0", Role::Prefill).save(dir.path(), "prefill-0").unwrap();
    let credentials = Credentials::load(dir.path(), "prefill-0", Role::Prefill).unwrap();
    assert_eq!(credentials.identity().unwrap(), ("prefill-0".to_owned(), Role::Prefill));
}

/// A directory with the files of two nodes, changed by `spoil`.
fn load_error(spoil: impl Fn(&Path)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let authority = MeshAuthority::generate();
    authority.save(dir.path()).unwrap();
    for name in ["decode-0", "decode-1"] {
        authority.issue(name, Role::Decode).save(dir.path(), name).unwrap();
    }
    Credentials::load(dir.path(), "decode-0", Role::Decode).unwrap();
    spoil(dir.path());
    Credentials::load(dir.path(), "decode-0", Role::Decode).err().unwrap().to_string()
}

#[test]
fn a_missing_file_is_named() {
    for file in ["ca.pem", "decode-0.pem", "decode-0.key"] {
        let error = load_error(|dir| fs::remove_file(dir.join(file)).unwrap());
        assert!(error.contains(file) && error.contains("No such file"), "{error}");
    }
}

#[test]
fn a_file_of_rubbish_is_named() {
    for file in ["ca.pem", "decode-0.pem", "decode-0.key"] {
        let error = load_error(|dir| fs::write(dir.join(file), "rubbish").unwrap());
        assert!(error.contains(file) && error.contains("PEM"), "{error}");
    }
}

#[test]
fn a_key_of_another_certificate_is_found_at_start() {
    let error = load_error(|dir| _ = fs::copy(dir.join("decode-1.key"), dir.join("decode-0.key")).unwrap());
    assert!(error.contains("decode-0.key"), "{error}");
}

#[test]
fn a_certificate_for_another_name_or_role_is_found_at_start() {
    let error = load_error(|dir| {
        for ending in ["pem", "key"] {
            fs::copy(dir.join(format!("decode-1.{ending}")), dir.join(format!("decode-0.{ending}"))).unwrap();
        }
    });
    assert!(error.contains("decode-0.pem"), "{error}");
    assert!(error.contains("is for the decode \"decode-1\", not for the decode \"decode-0\""), "{error}");
    let error = load_error(|dir| {
        MeshAuthority::load(dir).unwrap().issue("decode-0", Role::Prefill).save(dir, "decode-0").unwrap();
    });
    assert!(error.contains("is for the prefill \"decode-0\", not for the decode \"decode-0\""), "{error}");
}

#[test]
fn a_certificate_of_another_authority_is_found_at_start() {
    let error = load_error(|dir| MeshAuthority::generate().save(dir).unwrap());
    assert!(error.contains("decode-0.pem") && error.contains("ca.pem"), "{error}");
}

#[test]
fn an_authority_with_the_key_of_another_is_found_when_read() {
    let dir = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    MeshAuthority::generate().save(dir.path()).unwrap();
    MeshAuthority::generate().save(other.path()).unwrap();
    fs::copy(other.path().join("ca.key"), dir.path().join("ca.key")).unwrap();
    let error = MeshAuthority::load(dir.path()).err().unwrap().to_string();
    assert!(error.contains("ca.key"), "{error}");
}

#[test]
fn names_that_are_no_file_names_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let authority = MeshAuthority::generate();
    for name in ["", "../up", ".hidden", "a/b", "ca", "naïve", &"x".repeat(64)] {
        assert!(authority.issue(name, Role::Decode).save(dir.path(), name).is_err(), "{name:?}");
        assert!(Credentials::load(dir.path(), name, Role::Decode).is_err(), "{name:?}");
    }
}
